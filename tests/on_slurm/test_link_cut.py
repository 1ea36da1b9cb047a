"""A link cut of the batch host that is longer than SLURM's tries to tell srun of a task's end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import nodes_of, own_sandbox
from support.slurm.train_project import UNHURRIED, Command, make_project

pytestmark = pytest.mark.slurm


@pytest.fixture
def patient() -> Iterator[FaultySandbox]:
    """A SLURM that does not give a node up during the cut."""
    with own_sandbox("l", nodes=2, slurmd_timeout_s=300) as made:
        yield made


@pytest.mark.parametrize("elastic", [False, True], ids=["plain", "elastic"])
def test_a_run_goes_on_after_a_link_cut_in_which_all_agents_leave(
    patient: FaultySandbox, tmp_path: Path, elastic: bool
) -> None:
    if not patient.plan.namespaces:
        pytest.fail("links can be cut as root only")
    command = Command(make_project(tmp_path / "project"), patient.environment())
    run = command.submit(
        "cut", "nodes=2", "ranks_per_node=1", "train.steps=60", "train.save_every=5", UNHURRIED,
        f"elastic={str(elastic).lower()}",
    )  # fmt: skip
    run.wait("checkpoint", lambda: run.events("saved"))
    first = nodes_of(run, 0)[0]
    patient.cut_link(first)
    time.sleep(38)
    patient.restore_link(first)
    run.wait_finished()
    assert [end["outcome"] for end in run.events("ended")][-1] == "finished"
