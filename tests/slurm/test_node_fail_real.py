"""Nodes that fail under a run, on a real SLURM with a stub inside: its next attempts run elsewhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_runs import ENDLESS, Run, starter

from slurmddp.environments.hostlist import expand
from slurmddp.launchers.submitter import build
from slurmddp.runs.excluded import excluded_nodes
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.sandbox import Sandbox

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ALONE = {"exclusive": True}


@pytest.fixture(scope="module")
def failing() -> Iterator[Sandbox]:
    """A SLURM that gives a silent node up soon, with two nodes more than the runs need."""
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as folder:
        made = Sandbox(
            f"n{os.getpid()}", root=Path(folder) / "sandbox", nodes=6, slurmd_timeout_s=10, kill_wait_s=20
        )
        made.up()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in made.environment().items():
                patch.setenv(name, value)
            try:
                yield made
            finally:
                made.down()


def nodes_of(run: Run, attempt: int) -> list[str]:
    return list(expand(run.events("started")[attempt]["nodes"]))


def excluded_by(sandbox: Sandbox, job_id: str) -> list[str]:
    """Return the nodes that SLURM keeps a job from."""
    shown = sandbox.command("scontrol", "-o", "show", "job", job_id)
    return list(expand(shown.partition(" ExcNodeList=")[2].split()[0]))


def finish(run: Run) -> None:
    run.aim(1)
    run.wait_over()
    assert run.ends()[-1] == ("finished", "none")


def test_the_next_attempt_of_a_run_that_lost_a_node_runs_on_others(failing: Sandbox, tmp_path: Path) -> None:
    """One run is put back by SLURM, the other submits a new job; the nodes are soon back."""
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
    failing: Sandbox, tmp_path: Path
) -> None:
    """The step goes on, srun ends with 0, and the node is known to have failed."""
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
        assert "srun ended with code 0." in batch_log.read_text()
        assert run.ends() == [("finished", "none")]
        assert excluded_nodes(run.folder) == [node]
    for run, node in zip(runs, lost, strict=True):
        run.wait(lambda run=run: slurm.jobs([run.job_id])[run.job_id].state == "COMPLETED", "completed job")
        failing.restore_node(node)


def test_a_run_whose_only_node_failed_does_not_stay_on_it_when_it_is_given_it_again(
    failing: Sandbox, tmp_path: Path
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
