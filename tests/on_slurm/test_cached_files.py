"""Nodes with caches of a network file system: a run goes on at once on nodes that have just left it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slurm.sandboxes import own_sandbox
from support.slurm.train_project import UNHURRIED, Command, Run, make_project, occupy, of_attempt

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(params=["nfs", pytest.param("sshfs", marks=pytest.mark.slow)])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Command]:
    """The command in a project that the nodes mount."""
    with own_sandbox("c", nodes=2, shared=request.param, shared_folder=tmp_path) as sandbox:
        yield Command(make_project(tmp_path / "project"), sandbox.environment())


def wait_attempt(run: Run, attempt: int) -> None:
    run.wait(f"steps of attempt {attempt}", lambda: of_attempt(run.records("metrics.jsonl"), attempt))


def test_a_run_starts_again_at_once_on_the_nodes_that_it_has_just_left(command: Command) -> None:
    """SLURM opens the log of each node in a folder that was absent when the agents there left."""
    run = command.submit("cached", "nodes=2", "ranks_per_node=1", "train.steps=100000", UNHURRIED)
    wait_attempt(run, 0)
    command("stop", "cached")
    run.wait("end", lambda: len(run.events("ended")) == 1)
    command("resume", "cached")
    wait_attempt(run, 1)
    occupy(command)
    run.wait("end of the preempted attempt", lambda: len(run.events("ended")) == 2)
    wait_attempt(run, 2)
    command("cancel", "cached")
    run.wait("end of the job", lambda: not command.slurm("squeue", "-h", "-j", run.job_id))
    command("resume", "cached")
    wait_attempt(run, 3)
    command("stop", "cached")
    run.wait("last end", lambda: len(run.events("ended")) == 4)
    ends = [(end["attempt"], end["outcome"], end["exit_code"]) for end in run.events("ended")]
    assert ends == [(0, "stopped", 75), (1, "stopped", 75), (2, "cancelled", 75), (3, "stopped", 75)]
    assert run.events("rank_failed") == []
    logs = run.folder / "logs"
    assert not [path for path in logs.glob("*/batch.log") if "launch failed" in path.read_text()]
