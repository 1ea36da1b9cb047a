"""The report of a run that failed is written, also where that takes its time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from agent_runs import make_run
from local_runs import job_of

from slurmddp.errors import RankFailure
from slurmddp.launchers.local.run import LocalRun

AGENTS = """
import os, pathlib, signal, sys, time
folder, node = pathlib.Path(sys.argv[1]), int(os.environ["SLURM_NODEID"])
signal.signal(signal.SIGTERM, lambda *told: None)
(folder / f"here-{node}").touch()
while len(list(folder.glob("here-*"))) < 2:
    time.sleep(0.01)
if node == 0:
    time.sleep(2.2)  # On a busy machine the plotting library alone takes a second.
    (folder / "report.html").touch()
os._exit(1)
"""


def test_the_first_agent_has_the_time_to_write_the_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "", nodes=2)
    command = [sys.executable, "-c", AGENTS, str(tmp_path)]
    run = LocalRun(job_of(folder, nodes=2), folder, command=command, say=lambda text: None)
    run.start()
    with pytest.raises(RankFailure):
        run.wait()
    assert (tmp_path / "report.html").exists()
