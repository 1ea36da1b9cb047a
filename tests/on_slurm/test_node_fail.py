"""Nodes that fail under a run: the next attempt runs on other nodes, or the job continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.environments.hostlist import expand
from slurmddp.launchers.submit.submitter import build
from slurmddp.runs.folder.excluded_nodes import excluded_nodes
from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.slurm.client import SlurmClient
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import bring_back, nodes_of, own_sandbox, shortest_timeout_s
from support.slurm.stub_runs import ENDLESS, Run, starter
from support.slurm.train_project import Command, make_project
from support.slurm.train_project import Run as TrainingRun
from support.slurm.versions import by_version

pytestmark = [pytest.mark.slurm, pytest.mark.shared_folder, pytest.mark.timeout(600)]

ALONE = {"exclusive": True}


@pytest.fixture(scope="module")
def six_nodes() -> Iterator[FaultySandbox]:
    """A SLURM that gives a silent node up soon, with two nodes more than the runs need."""
    options = {"nodes": 6, "slurmd_timeout_s": shortest_timeout_s(), "kill_wait_s": 20}
    with own_sandbox("n", **options) as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment().items():
            patch.setenv(name, value)
        yield made


@pytest.fixture
def failing(six_nodes: FaultySandbox) -> FaultySandbox:
    """The same SLURM with all of its nodes, whatever an earlier test has left of them."""
    bring_back(six_nodes)
    return six_nodes


def excluded_by(sandbox: FaultySandbox, job_id: str) -> list[str]:
    """Return the nodes that SLURM keeps a job from."""
    shown = sandbox.command("scontrol", "-o", "show", "job", job_id)
    return list(expand(shown.partition(" ExcNodeList=")[2].split()[0]))


def finish(run: Run) -> None:
    run.aim(1)
    run.wait_over()
    assert run.ends()[-1] == ("finished", "none")


def test_the_next_attempt_of_a_run_that_lost_a_node_runs_on_others(
    failing: FaultySandbox, tmp_path: Path
) -> None:
    """SLURM requeues one run, the other run submits a new job; the nodes soon return."""
    start = starter(tmp_path, SlurmClient())
    requeued = start(goal=ENDLESS, nodes=2, name="requeued", sbatch=ALONE)
    resubmitted = start(goal=ENDLESS, nodes=2, name="resubmitted", sbatch=ALONE, refused=True)
    runs = (requeued, resubmitted)
    for run in runs:
        run.wait_started()
    lost = [nodes_of(run, 0)[-1] for run in runs]
    for node in lost:
        failing.kill_node(node, with_jobs=True)
    for run, node in zip(runs, lost, strict=True):
        run.wait(lambda run=run, node=node: node in excluded_nodes(run.folder), "note of the failed node")
    for node in lost:
        failing.restore_node(node)
    for run, node in zip(runs, lost, strict=True):
        run.wait_started(attempts=2)
        assert node not in nodes_of(run, 1)
        assert node in excluded_by(failing, run.events("started")[1]["job_id"])
    assert requeued.ends()[0] == ("stopped", "requeue")
    assert resubmitted.ends()[0] == ("stopped", "resubmit")
    for run in runs:
        finish(run)
    again = build("sbatch", SlurmClient()).submit(requeued.job)
    assert lost[0] in excluded_by(failing, again)
    failing.cancel_jobs()


def test_a_job_with_a_spare_and_one_that_goes_on_with_fewer_outlive_a_node(
    failing: FaultySandbox, tmp_path: Path
) -> None:
    """The step continues, srun exits with 0 (24.11: 1), and the run folder names the failed node."""
    slurm = SlurmClient()
    start = starter(tmp_path, slurm)
    common: dict[str, Any] = {"goal": ENDLESS, "sbatch": ALONE, "env": {"STUB_REPLACED": "1"}}
    runs = (
        start(nodes=2, spare_nodes=1, name="spare", **common),
        start(nodes=3, elastic=True, name="fewer", **common),
    )
    for run in runs:
        run.wait_started()
    lost = [nodes_of(run, 0)[1] for run in runs]
    for node in lost:
        failing.kill_node(node, with_jobs=True)
    for run, node in zip(runs, lost, strict=True):
        batch_log = run.folder.log_dir(0) / "batch.log"
        run.wait(lambda log=batch_log, node=node: f"Node failure on {node}" in log.read_text(), "lost node")
        finish(run)
        assert f"\nsrun ended with code {by_version(0, 1)}.\n" in batch_log.read_text()
        assert run.ends() == [("finished", "none")]
        own = [one["node"] for one in read_lines(run.folder.excluded_file) if "run" not in one]
        assert own == [node]  # The list may also name the node of the other run.
    for run, node in zip(runs, lost, strict=True):
        run.wait(lambda run=run: slurm.jobs([run.job_id])[run.job_id].state == "COMPLETED", "completed job")
        failing.restore_node(node)


def test_a_run_whose_only_node_failed_does_not_stay_on_it_when_it_is_given_it_again(
    failing: FaultySandbox, tmp_path: Path
) -> None:
    """SLURM can start nothing until the node is back, and then takes the first."""
    run = starter(tmp_path, SlurmClient())(goal=ENDLESS, nodes=1, name="hostless", sbatch=ALONE)
    run.wait_started()
    (node,) = nodes_of(run, 0)
    failing.command("scontrol", "update", "PartitionName=low", "State=DOWN")
    failing.kill_node(node, with_jobs=True)
    run.wait(lambda: failing.jobs().get(run.job_id) == "PENDING", "requeued job")
    failing.restore_node(node)
    run.wait(lambda: failing.status().nodes[node] == "idle", "node that is back")
    failing.command("scontrol", "update", "PartitionName=low", "State=UP")
    run.wait_started(attempts=2)
    assert [event["restart_count"] for event in run.events("started")] == [0, 2], "once it was turned away"
    assert node not in nodes_of(run, 1)
    assert node in excluded_by(failing, run.job_id)
    finish(run)


def test_trainings_outlive_a_node_whose_place_a_spare_takes_and_the_first_node(
    failing: FaultySandbox, tmp_path: Path
) -> None:
    """The remaining agent requeues the second job: SLURM would leave the job as it is."""
    command = Command(make_project(tmp_path / "project"), failing.environment())
    common = ["nodes=2", "ranks_per_node=1", "train.steps=30", "train.save_every=5"]
    # Seconds of training are left when both have saved, however slow the commands are.
    common += ["+data.delay_s=0.6", "+cluster.sbatch.exclusive=true"]
    spared = command.submit("spared", *common, "spare_nodes=1")
    headless = command.submit("headless", *common, "elastic=true")
    spared.wait("checkpoint", lambda: spared.events("saved"))
    headless.wait("checkpoint", lambda: headless.events("saved"))
    lost, first = nodes_of(spared, 0)[1], nodes_of(headless, 0)[0]
    for node in (lost, first):
        failing.kill_node(node, with_jobs=True)
    for run in (spared, headless):
        run.wait_finished()
    for node in (lost, first):
        failing.restore_node(node)

    assert [(end["attempt"], end["outcome"]) for end in spared.events("ended")] == [(0, "finished")]
    begun, finished = headless.events("ended")
    assert (begun["outcome"], begun["next"], begun["lost"]) == ("stopped", "requeue", {"0": first})
    assert (finished["attempt"], finished["outcome"]) == (1, "finished")
    assert spared.checkpoint()["state.safetensors"] == headless.checkpoint()["state.safetensors"]
    assert spared.losses() == headless.losses()
    assert [(event["restart_count"], event["spare"]) for event in spared.events("restarted")] == [(1, [2])]
    # The list may also name the node of the other run.
    own = [line["node"] for line in spared.records("excluded.jsonl") if "run" not in line]
    assert own == [lost]

    assert [event["restart_count"] for event in headless.events("started")] == [0, 1]
    assert first not in nodes_of(headless, 1)
    agent_log = (headless.folder / "logs/attempt-0/node-1.log").read_text()
    assert f"SLURM has lost {first}, on which the batch script of job {headless.job_id} ran." in agent_log


def weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(run.folder / "checkpoints")
    assert newest is not None
    found = checkpoint.read(newest)
    assert found.step == 16
    return dict(found.state["objects"]["model"])


def test_t10_a_training_goes_on_with_fewer_nodes_and_the_same_samples_in_each_step(
    failing: FaultySandbox, tmp_path: Path
) -> None:
    command = Command(make_project(tmp_path / "project"), failing.environment())
    common = [
        "train.steps=16",
        "train.save_every=4",
        "ranks_per_node=1",
        "model.dropout=0",
        "+cluster.sbatch.exclusive=true",
    ]
    whole = command.submit("whole", *common, "nodes=1", "train.batch_size=12", "+data.delay_s=0")
    run = command.submit("fewer", *common, "nodes=3", "elastic=true", "+data.delay_s=0.7")
    run.wait("checkpoint", lambda: run.events("saved"))
    lost = nodes_of(run, 0)[1]
    failing.kill_node(lost, with_jobs=True)
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
