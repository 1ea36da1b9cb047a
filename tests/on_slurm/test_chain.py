"""A run as a chain of jobs, where the site lets none be requeued: each job submits one next job.

One long chain runs beside the other tests of this file, in a partition whose limit it outlives.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_NO_PROGRESS
from slurmddp.sandbox import Sandbox
from slurmddp.slurm.client import SlurmClient
from support.slurm.stub_runs import ENDLESS, Run, Start, starter

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def nothing_left_in_the_sandbox() -> None:
    """Replace the fixture that cancels all jobs: one job runs from test to test here."""


@pytest.fixture(scope="module", autouse=True)
def partitions(sandbox: Sandbox) -> Iterator[None]:
    """Make one partition whose longest job is the shortest that SLURM knows, and one to close and open."""
    for name, options in (("minute", ["MaxTime=1"]), ("gate", [])):
        sandbox.command("scontrol", "create", f"PartitionName={name}", "Nodes=ALL", *options)
    yield
    assert sandbox.cancel_jobs(), f"jobs that can't be cancelled: {sandbox.jobs()}"
    for name in ("minute", "gate"):
        sandbox.command("scontrol", "delete", f"PartitionName={name}")


@pytest.fixture(scope="module", autouse=True)
def long_chain(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory, partitions: None) -> Iterator[Run]:
    """A run whose jobs may last a minute.

    SLURM checks every half minute which job to signal, here ten seconds ahead or more. A signal to a job
    without a step is lost.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sandbox.environment().items():
            patch.setenv(name, value)
        begin = starter(tmp_path_factory.mktemp("chain"), SlurmClient())
        yield begin(goal=ENDLESS, nodes=1, name="long", partition="minute", lead_s=20, refused=True)


def waiting(run: Run) -> list[str]:
    """Return the jobs of a run that wait in SLURM's queue."""
    ids = ",".join(event["job_id"] for event in run.events("submitted"))
    command = ["squeue", "--noheader", "--states=PENDING", f"--jobs={ids}", "--format=%i"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def stop(run: Run, job_id: str) -> None:
    """Signal the ranks, as SLURM does at a time limit."""
    subprocess.run(["scancel", "--signal=USR2", job_id], check=True)


def gate(state: str) -> None:
    subprocess.run(["scontrol", "update", "PartitionName=gate", f"State={state}"], check=True)


@pytest.fixture
def between_jobs(start: Start) -> Iterator[Run]:
    """A run between two jobs: the first has ended, the next can't start while the gate is closed."""
    gate("UP")
    run = start(goal=ENDLESS, nodes=1, name="gated", partition="gate", refused=True)
    run.wait_started()
    gate("DOWN")
    stop(run, run.job_id)
    run.wait(lambda: len(run.events("submitted")) == 2, "resubmitted job")
    assert run.ends() == [("stopped", "resubmit")]
    yield run
    gate("UP")


def test_failures_are_counted_along_the_chain(start: Start) -> None:
    """Each attempt gets two steps further and crashes, after sbatch and after submitit."""
    own = {"goal": ENDLESS, "nodes": 1, "refused": True, "max_restarts": 2, "env": {"STUB_CRASH": "2"}}
    runs = [start(name, options=("--no-requeue",), **own) for name in ("sbatch", "submitit")]
    for run in runs:
        run.wait_over()
        assert run.ends() == [("failed", "resubmit"), ("failed", "resubmit"), ("failed", "none")]
        assert len({event["job_id"] for event in run.events("started")}) == 3
        assert waiting(run) == []


def test_a_hold_and_a_begin_time_delay_the_first_job_only(start: Start) -> None:
    delays = {"hold": True, "begin": "now+1hour"}
    own = {"nodes": 1, "refused": True, "max_restarts": 1, "env": {"STUB_CRASH": "2"}}
    run = start(goal=ENDLESS, name="delayed", sbatch=delays, **own)
    for words in (["update", f"JobId={run.job_id}", "StartTime=now"], ["release", run.job_id]):
        subprocess.run(["scontrol", *words], check=True)
    run.wait_over()
    assert run.ends() == [("failed", "resubmit"), ("failed", "none")]


def test_two_jobs_that_are_stopped_at_one_step_end_the_chain(start: Start, slurm: SlurmClient) -> None:
    run = start(
        goal=ENDLESS, nodes=1, refused=True, target="slurmddp.training.trainer.train", env={"STUB_STUCK": "1"}
    )
    for attempt in (0, 1):
        run.wait_started(attempt + 1)
        stop(run, run.events("started")[attempt]["job_id"])
    run.wait_over()
    assert run.ends() == [("stopped", "resubmit"), ("no_progress", "none")]
    last = run.events("started")[-1]["job_id"]
    run.wait(lambda: slurm.jobs([last])[last].terminal, "end of the job")
    told = subprocess.run(["scontrol", "show", "job", last], check=True, capture_output=True, text=True)
    assert f" ExitCode={EXIT_NO_PROGRESS}:0" in told.stdout
    assert waiting(run) == []


def test_jobs_whose_program_saves_nothing_are_resubmitted_three_times(start: Start) -> None:
    run = start(goal=ENDLESS, nodes=1, env={"STUB_STUCK": "1"})
    for attempt in range(4):
        run.wait_started(attempt + 1)
        stop(run, run.job_id)
        run.wait(lambda ends=attempt + 1: len(run.ends()) == ends, "end")
    assert run.ends() == [("stopped", "requeue")] * 3 + [("no_progress", "none")]
    assert waiting(run) == []


@pytest.mark.parametrize("command", ["cancel", "stop"])
def test_a_person_ends_a_chain_while_a_job_of_it_runs(start: Start, slurm: SlurmClient, command: str) -> None:
    run = start(goal=ENDLESS, nodes=1, refused=True)
    run.wait_started()
    assert main([command, str(run.folder.path)]) == 0
    if command == "stop":
        stop(run, run.job_id)  # the stub looks for no file
    run.wait_over()
    assert run.ends() == [("cancelled" if command == "cancel" else "stopped", "none")]
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].terminal, "end of the job")
    assert len(run.events("submitted")) == 1


@pytest.mark.parametrize("command", ["cancel", "stop"])
def test_a_person_ends_a_chain_between_two_jobs(between_jobs: Run, slurm: SlurmClient, command: str) -> None:
    assert main([command, str(between_jobs.folder.path)]) == 0
    job = between_jobs.events("submitted")[-1]["job_id"]
    between_jobs.wait(lambda: slurm.jobs([job])[job].state == "CANCELLED", "end of the resubmitted job")
    assert len(between_jobs.events("started")) == 1


def test_a_resubmitted_job_whose_run_has_ended_meanwhile_starts_nothing(
    between_jobs: Run, slurm: SlurmClient
) -> None:
    between_jobs.aim(between_jobs.steps() + 1)
    other = ["sbatch", "--parsable", "--partition=low", str(between_jobs.folder.script_file)]
    subprocess.run(other, check=True, capture_output=True)
    between_jobs.wait_over()
    before = between_jobs.folder.events()
    gate("UP")
    job = between_jobs.events("submitted")[-1]["job_id"]
    between_jobs.wait(lambda: slurm.jobs([job])[job].state == "COMPLETED", "end of the resubmitted job")
    assert between_jobs.folder.events() == before
    assert between_jobs.folder.attempts() == [0, 1]
    said = (between_jobs.folder.path / "logs" / f"slurm-{job}.out").read_text()
    assert "has ended already (finished)" in said


def test_a_run_that_outlives_the_limit_goes_on_in_job_after_job_until_it_is_done(long_chain: Run) -> None:
    for links in (2, 3):
        long_chain.wait_started(links)
        assert len(waiting(long_chain)) <= 1
    long_chain.aim(1)
    long_chain.wait_over()
    *stops, end = long_chain.ends()  # a slow machine may need one link more
    assert len(stops) >= 2 and set(stops) == {("stopped", "resubmit")} and end == ("finished", "none")
    assert [" on USR2\n" in long_chain.log(attempt) for attempt in (0, 1)] == [True, True]
    jobs = [event["job_id"] for event in long_chain.events("submitted")]
    assert [event["job_id"] for event in long_chain.events("started")] == jobs
    assert len(set(jobs)) == len(stops) + 1
    assert waiting(long_chain) == []
