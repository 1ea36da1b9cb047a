"""A training with `elastic=true` loses a node and continues on fewer nodes in the same job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import nodes_of, own_sandbox, shortest_timeout_s
from support.slurm.train_project import Command, Run, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

STEPS = 16


@pytest.fixture
def sandbox() -> Iterator[FaultySandbox]:
    """A SLURM that gives a silent node up soon."""
    with own_sandbox("e", nodes=4, slurmd_timeout_s=shortest_timeout_s()) as made:
        yield made


def weights(run: Run) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(run.folder / "checkpoints")
    assert newest is not None
    found = checkpoint.read(newest)
    assert found.step == STEPS
    return dict(found.state["objects"]["model"])


def test_a_training_goes_on_with_fewer_nodes_and_the_same_samples_in_each_step(
    sandbox: FaultySandbox, tmp_path: Path
) -> None:
    command = Command(make_project(tmp_path / "project"), sandbox.environment())
    common = [
        f"train.steps={STEPS}",
        "train.save_every=4",
        "ranks_per_node=1",
        "model.dropout=0",
        "+cluster.sbatch.exclusive=true",
    ]
    whole = command.submit("whole", *common, "nodes=1", "train.batch_size=12", "+data.delay_s=0")
    run = command.submit("fewer", *common, "nodes=3", "elastic=true", "+data.delay_s=0.1")
    run.wait("checkpoint", lambda: run.events("saved"))
    lost = nodes_of(run, 0)[1]
    sandbox.kill_node(lost, with_jobs=True)
    run.wait_finished()
    whole.wait_finished()

    (restarted,) = run.events("restarted")
    assert (restarted["node"], restarted["nodes"]) == (1, 2)
    assert len(run.events("started")) == 1, "in the same job"
    # As near as a sum over other numbers of ranks can be; other samples would be a hundred times as far away.
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=1e-5)
    assert [line["node"] for line in run.records("excluded.jsonl")] == [lost]
    told = json.loads(command("status", "--json", run.folder.name))
    assert {"starting", "training", "lost"} <= set(told["goodput"]["parts"])
    assert f"node 1 ({lost}) was lost" in command("status", "-v", run.folder.name)
