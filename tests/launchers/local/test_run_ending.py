"""A pretended node whose agent still writes a checkpoint when another node has failed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from slurmddp.launchers.local.run import LocalRun
from slurmddp.spec import Resources
from support.runs.agent_runs import make_run, wait_until
from support.runs.local_runs import job_of

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
    folder = make_run(tmp_path, "")
    job = job_of(folder, resources=Resources(nodes=2, ranks_per_node=1))
    run = LocalRun(job, folder, command=[sys.executable, "-c", WRITING, str(folder.path)])
    run.start()
    try:
        wait_until(lambda: run.poll() is None and folder.failure_file(0).exists(), "node 1 has failed")
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + passed_s)
        assert run.poll() is None
        monkeypatch.undo()
        if not killed:
            (folder.path / "written").touch()
        wait_until(lambda: run.poll() == 1, "all have ended")
        assert [agent.returncode for agent in run.nodes.agents] == [-9 if killed else 1, 1]
    finally:
        run.kill()
        run.wait()
