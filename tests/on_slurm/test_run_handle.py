"""Functions as jobs of a real SLURM, one or many: their results come back to the caller."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.errors import EXIT_FINISHED, SlurmddpError
from slurmddp.sandbox import Sandbox

pytestmark = pytest.mark.slurm

MODULE = """
import os

def place(word):
    return word, os.environ["WORLD_SIZE"], os.environ["SLURM_JOB_NUM_NODES"]
"""

ARRAY_MODULE = """
import os, pathlib

def tenfold(number, folder):
    assert number < 2 or (pathlib.Path(folder) / "mended").exists(), "no luck"
    return number * 10, os.environ["SLURM_ARRAY_TASK_ID"]
"""


def test_a_function_runs_on_two_nodes_and_its_result_comes_back(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "job_work.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        run = slurmddp.submit("job_work.place", "here", cluster="sandbox", nodes=2, ranks_per_node=1)
        assert run.status().active
        assert run.result(400) == ("here", "2", "2")
    finally:
        sys.modules.pop("job_work", None)


def test_calls_of_a_function_are_one_array_whose_failed_elements_resume_as_one_array(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "array_work.py").write_text(ARRAY_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"cluster": "sandbox", "ranks_per_node": 1, "array_parallelism": 2, "policy.max_restarts": 0}
    try:
        runs = slurmddp.map_array("array_work.tenfold", [1, 2, 3], [str(tmp_path)] * 3, **settings)
    finally:
        sys.modules.pop("array_work", None)
    assert capsys.readouterr() == ("", "")
    assert runs[0].result(400) == (10, "0")
    for run in runs[1:]:
        with pytest.raises(SlurmddpError, match=r"did not finish \(failed\).*no luck"):
            run.result(400)
    (tmp_path / "mended").touch()
    assert main(["resume", "tenfold-sweep"]) == EXIT_FINISHED
    shown, told = capsys.readouterr()
    assert "(2 of 3 runs to resume)" in shown and "(2 jobs on 1 node" in shown and "has finished" in told
    assert [run.result(400) for run in runs] == [(10, "0"), (20, "0"), (30, "1")]
    assert main(["rm", "tenfold-sweep", "--yes"]) == EXIT_FINISHED
    assert not [*(tmp_path / "runs").iterdir()], "neither runs nor arrays are left"
