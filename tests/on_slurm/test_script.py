"""The batch script on a real SLURM, with a stub in place of the agents: only what SLURM and the shell do."""

from __future__ import annotations

import os
import subprocess

import pytest

from slurmddp.sandbox import Sandbox
from slurmddp.slurm.client import SlurmClient
from support.slurm.stub_runs import ENDLESS, Run, Start

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

BOTH = pytest.mark.parametrize("submitter", ["sbatch", "submitit"])


def occupy(run: Run) -> None:
    """Submit a short job of higher priority to the nodes on which `run` has started."""
    nodes = run.events("started")[-1]["nodes"]
    command = ["sbatch", "--partition=high", f"--nodelist={nodes}", f"--nodes={run.job.resources.nodes}"]
    command += ["--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    subprocess.run(command, check=True, capture_output=True)


@BOTH
def test_a_job_runs_to_its_end(start: Start, slurm: SlurmClient, submitter: str) -> None:
    run = start(submitter, goal=3, nodes=3)
    run.wait_over()
    assert run.ends() == [("finished", "none")]
    assert run.steps() == 3
    logs = [(run.folder.log_dir(0) / f"node-{node}.log").read_text() for node in range(3)]
    assert [f"node {node} of 3 starts at 0" in log for node, log in enumerate(logs)] == [True] * 3
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].state == "COMPLETED", "completed job")


@BOTH
def test_a_preempted_job_comes_back_and_goes_on(start: Start, submitter: str) -> None:
    run = start(submitter, goal=ENDLESS)
    run.wait_started()
    occupy(run)
    saved = run.wait_stopped()
    run.wait_over()
    assert run.ends() == [("stopped", "requeue"), ("finished", "none")]
    assert {event["job_id"] for event in run.events("started")} == {run.job_id}
    assert [event["restart_count"] for event in run.events("started")] == [0, 1]
    assert f"starts at {saved}," in run.log(1)
    assert run.steps() == saved + 3


def test_a_job_at_its_time_limit_saves_and_goes_on(start: Start) -> None:
    # SLURM sends the signal up to half a minute early, here ten seconds after the start or later; it reaches
    # steps only, so that one which came before the step would be lost.
    runs = [
        start(name, goal=ENDLESS, nodes=1, time_limit_min=1, lead_s=20) for name in ("sbatch", "submitit")
    ]
    for run in runs:
        run.wait_started(attempts=2)
        assert run.ends()[0] == ("stopped", "requeue")
        assert "ends at" in run.log(0)
        assert " on USR2" in run.log(0)


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
    subprocess.run(["scancel", "--signal=TERM", run.job_id], check=True)
    run.wait_stopped()
    run.wait_over()
    assert run.ends() == [("stopped", "requeue"), ("finished", "none")]


def test_where_requeueing_is_refused_a_new_job_goes_on_in_the_same_folder(start: Start) -> None:
    run = start(goal=ENDLESS, nodes=1, options=("--no-requeue",))
    run.wait_started()
    subprocess.run(["scancel", "--signal=TERM", run.job_id], check=True)
    run.wait_stopped()
    run.wait_over()
    assert run.ends() == [("stopped", "resubmit"), ("finished", "none")]
    first, second = run.events("started")
    assert first["job_id"] == run.job_id
    assert second["job_id"] == run.events("submitted")[1]["job_id"] != run.job_id


def test_a_failing_job_is_tried_again_a_limited_number_of_times(start: Start, slurm: SlurmClient) -> None:
    """One agent dies without a word, srun stops the other, which saves: srun's own code says 75."""
    run = start(goal=ENDLESS, env={"STUB_FAIL": "1"}, max_restarts=1)
    run.wait_over()
    assert run.ends() == [("failed", "requeue"), ("failed", "none")]
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].state == "FAILED", "failed job")


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
    assert shown.stdout.rstrip("\n").endswith(f" {words}")
    assert (run.folder.path / "logs" / f"slurm-{run.job_id}.out").exists()


def test_a_submission_from_inside_a_job_inherits_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SBATCH_TIMELIMIT", "SLURM_CPU_BIND", "SLURM_STEP_ID", "SLURM_NTASKS", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, "nonsense")
    run = start(goal=1)
    run.wait_over()
    assert run.ends() == [("finished", "none")]
    assert os.environ["SLURM_CPU_BIND"] == "nonsense"


def test_limits_are_read_and_hold(slurm: SlurmClient, start: Start) -> None:
    assert slurm.partitions()["low"].total_nodes == 3
    with pytest.raises(Exception, match="nodes=9 is more than partition 'low' gives a job"):
        start(goal=1, nodes=9)
