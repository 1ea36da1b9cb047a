"""The batch script on a real SLURM, with a stub in place of the agents: only what SLURM and the shell do."""

from __future__ import annotations

import subprocess

import pytest

from slurmddp.sandbox import Sandbox
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.limits.queries import partitions
from support.slurm.stub_runs import ENDLESS, Start

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

BOTH = pytest.mark.parametrize("submitter", ["sbatch", "submitit"])


@BOTH
def test_a_job_runs_to_its_end(start: Start, slurm: SlurmClient, submitter: str) -> None:
    run = start(submitter, goal=3, nodes=3)
    run.wait_over()
    assert run.ends() == [("finished", "none")]
    assert run.steps() == 3
    logs = [(run.folder.log_dir(0) / f"node-{node}.log").read_text() for node in range(3)]
    assert [f"node {node} of 3 starts at 0" in log for node, log in enumerate(logs)] == [True] * 3
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].state == "COMPLETED", "completed job")


@pytest.mark.slow
def test_a_job_killed_at_its_time_limit_goes_on_from_what_it_saved(start: Start) -> None:
    """Here the ranks hear nothing before the limit itself, and save in the seconds that SLURM then leaves."""
    run = start(goal=ENDLESS, nodes=1, time_limit_min=1, lead_s=5, env={"STUB_DEAF": "USR2"})
    run.wait_started(attempts=2)
    assert run.ends()[0] == ("stopped", "requeue")
    assert " on TERM" in (run.folder.log_dir(0) / "node-0.log").read_text()


@BOTH
def test_a_job_cancelled_with_scancel_stays_cancelled(
    start: Start, slurm: SlurmClient, submitter: str
) -> None:
    run = start(submitter, goal=ENDLESS)
    run.wait_started()
    slurm.cancel(run.job_id)
    run.wait_over()
    assert run.ends() == [("cancelled", "none")]
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].state == "CANCELLED", "cancelled job")


def test_a_stop_signal_from_a_person_puts_the_job_back(start: Start, sandbox: Sandbox) -> None:
    run = start(goal=ENDLESS)
    run.wait_started()
    subprocess.run(["scancel", "--signal=USR1", "--batch", run.job_id], check=True)  # Only a script knows it.
    subprocess.run(["scancel", "--signal=TERM", run.job_id], check=True)
    run.wait_stopped()
    run.wait_over()
    assert run.ends() == [("stopped", "requeue"), ("finished", "none")]


def test_a_second_job_of_a_run_leaves_the_first_one_alone(start: Start, slurm: SlurmClient) -> None:
    run = start(goal=ENDLESS, nodes=1)
    run.wait_started()
    command = ["sbatch", "--parsable", "--partition=low", str(run.folder.script_file)]
    second = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    run.wait(lambda: slurm.jobs([second])[second].state == "COMPLETED", "end of the second job")
    said = (run.folder.path / "logs" / f"slurm-{second}.out").read_text()
    assert f"Job {run.job_id} on {run.events('started')[0]['nodes']} runs this run already" in said
    run.aim(1)
    run.wait_over()
    assert run.ends() == [("finished", "none")]
    assert [event["job_id"] for event in run.events("started")] == [run.job_id]


def test_what_a_person_writes_reaches_sbatch_as_it_is(
    start: Start, slurm: SlurmClient, sandbox: Sandbox
) -> None:
    words = 'it\'s "5 $HOME" # `id` \\ ; rm -rf /'
    run = start(goal=1, nodes=1, env={"WORDS": words}, sbatch={"comment": words, "wckey": words})
    run.wait_over()
    shown = subprocess.run(
        ["squeue", "-h", "-t", "all", "-j", run.job_id, "-o", "%k"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.rstrip("\n") == words
    assert (run.folder.path / "logs" / f"slurm-{run.job_id}.out").exists()


def test_limits_are_read_and_hold(slurm: SlurmClient, start: Start) -> None:
    assert partitions(slurm)["low"].total_nodes == 3
    with pytest.raises(Exception, match="nodes=9: partition 'low' gives a job"):
        start(goal=1, nodes=9)
