"""The tutorial notebook in a real Jupyter kernel, with a real SLURM as its cluster."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from slurmddp.environments.scrub import scrub
from slurmddp.sandbox import Sandbox
from support.runs.examples import EXAMPLES, example

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

NOTEBOOK = "tutorial.ipynb"


@pytest.fixture
def tutorial(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The code cells of the tutorial after it has run."""
    folder = example("16_notebook", tmp_path)
    for name in (
        "IPYTHONDIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "MPLCONFIGDIR",
    ):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    environment = {**scrub(os.environ), **sandbox.environment(), "CUDA_VISIBLE_DEVICES": ""}
    programs = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {"PATH": programs, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}

    notebook = nbformat.read(folder / NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cells: list[Any], beginning: str) -> list[Any]:
    """Return the outputs of the only cell whose last statement begins with a text."""
    (cell,) = [cell for cell in cells if f"{cell.source.splitlines()[-1]}\n".startswith(beginning)]
    return cell.outputs


def printed(outputs: list[Any]) -> str:
    """Return what a cell printed; the kernel may deliver it in pieces."""
    return "".join(output.text for output in outputs if output.output_type == "stream")


def texts(outputs: list[Any], kind: str) -> str:
    return "".join(output.data.get(kind, "") for output in outputs if "data" in output)


def test_the_tutorial_trains_compares_submits_stops_and_resumes(tutorial: list[Any]) -> None:
    every = [output for cell in tutorial for output in cell.outputs]
    assert not [output for output in every if output.output_type == "error" or output.get("name") == "stderr"]

    for name in ("first", "slow"):
        shown = outputs(tutorial, f"{name}.wait()")
        assert [output.output_type for output in shown] == ["display_data", "execute_result"], "one output"
        html = texts(shown, "text/html")
        assert "finished" in html and "200 of 200" in html and "<svg" in html
        assert 'href="runs/' in html, "the display was updated with the report at the end"
        assert texts(shown, "text/plain").endswith("'finished'")

    assert "<svg" in texts(outputs(tutorial, "slurmddp.Run("), "text/html")
    assert texts(outputs(tutorial, "plt.legend"), "image/png")
    assert "optimizer.lr" in printed(outputs(tutorial, "!slurmddp diff"))
    assert "#SBATCH --nodes=2" in printed(outputs(tutorial, "!slurmddp train"))
    assert "slurmddp logs -f job-" in texts(outputs(tutorial, "job\n"), "text/html")
    stopped, finished = [cell for cell in tutorial if cell.source.endswith("job.wait().state")]
    assert texts(stopped.outputs, "text/plain").endswith("'stopped'")
    assert texts(finished.outputs, "text/plain").endswith("'finished'")


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "16_notebook" / NOTEBOOK).read_text())
    assert [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")] == []
