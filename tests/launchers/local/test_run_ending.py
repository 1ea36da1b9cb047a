"""A pretended node whose agent still writes a checkpoint when another node has failed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from support.runs.agent_runs import wait_until
from support.runs.local_runs import local_run

WRITING = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ["SLURM_NODEID"] == "0":
    (folder / "ready").touch()
while not (folder / ("ready" if os.environ["SLURM_NODEID"] == "1" else "written")).exists():
    time.sleep(0.01)
sys.exit(1)
"""


@pytest.mark.parametrize(("passed_s", "killed"), [(25, False), (35, True)])
def test_an_agent_has_as_long_as_under_slurm_to_write_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed_s: int, killed: bool
) -> None:
    run = local_run(tmp_path, command=[sys.executable, "-c", WRITING], nodes=2, ranks_per_node=1)
    folder, poll = run.folder, run.nodes.poll
    run.start()
    try:
        wait_until(lambda: poll() is None and folder.failure_file(0).exists(), "node 1 has failed")
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + passed_s)
        assert poll() is None
        monkeypatch.undo()
        if not killed:
            (folder.path / "written").touch()
        wait_until(lambda: poll() == 1, "all have ended")
        assert [agent.returncode for agent in run.nodes.agents] == [-9 if killed else 1, 1]
    finally:
        run.nodes.kill()
        run.wait()
