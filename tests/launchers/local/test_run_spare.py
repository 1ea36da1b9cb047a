"""A pretended node without ranks whose agent leaves first: it was stopped, and the others gave it up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.runs.agent_runs import events
from support.runs.local_runs import local_run

LEAVES_EARLY = """
import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
if os.environ["SLURM_NODEID"] == "2":
    sys.exit(75)
until = time.monotonic() + 2.5
while time.monotonic() < until and not told:
    time.sleep(0.01)
sys.exit(75 if told else 0)
"""


@pytest.mark.parametrize("job", [{"spare_nodes": 1, "nodes": 2}, {"elastic": True, "nodes": 3}], ids=str)
def test_a_node_that_is_given_up_and_leaves_does_not_stop_the_run(
    tmp_path: Path, job: dict[str, int]
) -> None:
    run = local_run(tmp_path, command=[sys.executable, "-c", LEAVES_EARLY], ranks_per_node=1, **job)
    run.start()
    assert run.wait() == 0
    assert [event["outcome"] for event in events(run.folder, "ended")] == ["finished"]
