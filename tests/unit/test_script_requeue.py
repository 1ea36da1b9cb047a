"""How the batch script lets a run go on where its own job can't be put back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from script_run import ENDING, FINISH, RUNNING, STOP, TRAIN, Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_job_that_may_not_requeue_submits_a_new_one(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.start(STOP, SLURM_CPU_BIND="x", SBATCH_TIMELIMIT="1", SRUN_DEBUG="1", PMI_RANK="1", SLURM_CONF="/c")
    assert run.end == ("stopped", "resubmit")
    assert run.asked() == ["sbatch"]
    assert run.events("submitted")[0] | {"time": 0} == {
        "event": "submitted",
        "time": 0,
        "job_id": "1",
        "submitter": "sbatch",
        "resubmitted": True,
    }
    options = run.programs.read("sbatch.argv").splitlines()
    assert options[-2:] == [str(run.folder.script_file), "successor"]
    assert "--dependency=afterany:41" in options
    names = {line.partition("=")[0] for line in run.programs.read("sbatch.env").splitlines()}
    assert not {"SLURM_JOB_ID", "SLURM_CPU_BIND", "SBATCH_TIMELIMIT", "SRUN_DEBUG", "PMI_RANK"} & names
    assert "SLURM_CONF" in names


@pytest.mark.parametrize("outcome", ["finished", "failed", "config", "no_progress"])
def test_a_successor_of_a_run_that_had_its_end_starts_nothing(run: Run, outcome: str) -> None:
    run.start(STOP)
    run.folder.add_event("submitted", job_id="42", submitter="sbatch", resubmitted=True)
    run.folder.add_event("ended", attempt=1, job_id="43", exit_code=0, outcome=outcome, next="none")
    before = run.folder.events()
    assert run.succeed() == 0
    assert run.folder.events() == before
    assert run.folder.attempts() == [0]


@pytest.mark.parametrize(
    "facts", [{"outcome": "stopped", "next": "resubmit"}, None], ids=["goes on", "resumed"]
)
def test_a_successor_of_a_run_that_is_to_go_on_begins(run: Run, facts: dict[str, str] | None) -> None:
    run.folder.add_event("ended", attempt=0, job_id="41", exit_code=1, outcome="failed", next="none")
    if facts is None:
        run.folder.add_event("submitted", job_id="44", submitter="sbatch")
    else:
        run.folder.add_event("ended", attempt=1, job_id="43", exit_code=75, **facts)
    assert run.succeed() == 0
    assert run.end == ("finished", "none")


def test_a_refused_requeue_becomes_a_new_submission(run: Run) -> None:
    run.programs.write("requeue", 'echo "Requested operation is presently disabled for job 41" >&2; exit 1')
    run.start(STOP)
    assert run.asked()[-1] == "sbatch"
    assert [event["job_id"] for event in run.events("submitted")] == ["1"]


def test_a_request_that_was_granted_though_its_answer_was_lost_is_enough(run: Run) -> None:
    granted = ENDING.replace("Restarts=0", "Restarts=1")
    run.programs.write("requeue", f'echo "{granted}" >job; exit 1')
    run.start(STOP)
    assert run.asked() == ["requeue 41"]


def test_a_job_that_is_pending_already_is_not_submitted_again(run: Run) -> None:
    pending = 'echo "JobState=PENDING Restarts=0" >job; echo "Job is pending execution for job 41"; exit 1'
    run.programs.write("requeue", pending)
    run.start(STOP)
    assert run.asked() == ["requeue 41"]


def test_a_requeue_that_is_seen_only_at_the_last_look_is_enough(run: Run) -> None:
    granted = ENDING.replace("Restarts=0", "Restarts=1")
    third = f'[ "$(grep -c ^requeue scontrol.calls)" -lt 3 ] || echo "{granted}" >job; exit 1'
    run.programs.write("requeue", third)
    run.start(STOP)
    assert run.asked() == ["requeue 41"] * 3
    assert run.end == ("stopped", "requeue")


# --- One job for each run ---


def queue_state(run: Run) -> str:
    return run.programs.read("jobs/41").partition("|")[0]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the look"])
@pytest.mark.parametrize("why", ["stop", "no progress", "failed"])
def test_a_job_that_slurm_put_back_leaves_the_queue_when_its_run_is_over(
    run: Run, why: str, late: bool
) -> None:
    run.programs.write("jobs/41", "PENDING||BeginTime|")
    requeued = ENDING.replace("Restarts=0", "Restarts=1")
    run.programs.write("job", RUNNING + " PreemptTime=2026-01-01T00:00:00" if late else requeued)
    if late:
        run.programs.write(
            "on-ask", f'[ "$(grep -c "show job" scontrol.calls)" -lt 3 ] || echo "{requeued}" >job'
        )
    if why == "no progress":
        run.start(TRAIN + "exit 143")
        run.programs.write("jobs/41", "PENDING||BeginTime|")
    steps = {"stop": 'touch "$SLURMDDP_RUN_DIR/stop"\n' + STOP, "no progress": TRAIN + STOP}
    refused = 'echo \'{"exit_code": 78}\' >"$logs/failure.json"; exit 78'
    run.start(steps.get(why, refused))
    assert run.end[1] == "none"
    assert queue_state(run) == "CANCELLED"


def test_a_job_that_slurm_did_not_put_back_ends_by_itself(run: Run) -> None:
    run.programs.write("jobs/41", "RUNNING|n[1-2]||")
    run.programs.write("job", RUNNING + " PreemptTime=2026-01-01T00:00:00")
    run.start('touch "$SLURMDDP_RUN_DIR/stop"\n' + STOP)
    assert (run.end, queue_state(run)) == (("stopped", "none"), "RUNNING")


def second_job(run: Run, state: str = "RUNNING|n[3-4]||", **environ: str) -> str:
    """Start the script as job 77 while job 41 has an attempt without an end; return what it says."""
    run.folder.log_dir(0).mkdir(parents=True)
    run.folder.add_event("started", attempt=0, job_id="41", restart_count=0, nodes="n[3-4]", launcher="slurm")
    if state:
        run.programs.write("jobs/41", state)
    run.programs.write("step", FINISH)
    script = ["bash", str(run.folder.script_file)]
    environ = {**run.environ, "SLURM_JOB_ID": "77", **environ}
    done = subprocess.run(script, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
@pytest.mark.parametrize("comment", ["", "slurmddp:it-s-50-j:0123456789ab", "slurmddp:after-40-3", "my own"])
def test_a_second_job_of_a_run_leaves_the_first_one_alone(run: Run, state: str, comment: str) -> None:
    said = second_job(run, f"{state}|n[3-4]||{comment}")
    assert "Job 41 on n[3-4] runs this run already" in said
    assert f"slurmddp stop {run.folder.name}" in said
    assert [event["job_id"] for event in run.events("started")] == ["41"]
    assert run.folder.attempts() == [0]
    assert run.asked() == []


@pytest.mark.parametrize(
    "state",
    [
        "",
        "PENDING||BeginTime|",
        "COMPLETED|||",
        "COMPLETING|n[3-4]||",
        "RUNNING|n[3-4]||slurmddp:other:0123456789ab",
    ],
    ids=["unknown", "queued", "over", "ending", "of another run"],
)
def test_a_second_job_takes_over_what_no_other_job_runs(run: Run, state: str) -> None:
    second_job(run, state)
    assert [event["job_id"] for event in run.events("started")] == ["41", "77"]
    assert run.end == ("finished", "none")


def test_a_slurm_that_does_not_answer_keeps_no_job_from_its_run(run: Run) -> None:
    run.programs.write("squeue-timeouts", "9")
    second_job(run)
    assert run.end == ("finished", "none")


def test_a_job_that_has_ended_its_attempt_keeps_no_other_from_the_run(run: Run) -> None:
    run.folder.add_event("ended", attempt=0, job_id="40", outcome="stopped", next="requeue")
    run.programs.write("jobs/40", "RUNNING|n[3-4]||")
    second_job(run, "")
    assert run.end == ("finished", "none")


# --- A successor ---


def test_a_submission_that_timed_out_but_was_queued_is_found(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.programs.write("timeouts", "1")
    run.programs.write("queued-anyway", "")
    run.start(STOP)
    assert run.programs.calls("sbatch") == 1
    assert [event["job_id"] for event in run.events("submitted")] == ["1"]


def test_a_queue_that_cannot_be_read_gets_no_second_successor(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.programs.write("timeouts", "1")
    run.programs.write("queued-anyway", "")
    run.programs.write("on-sleep", 'echo 9 >"$FAKE_SLURM/squeue-timeouts"')
    run.start(STOP)
    assert run.programs.calls("sbatch") == 1
    assert run.end == ("stopped", "none")


def test_a_banner_does_not_hide_the_new_job(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.programs.write("banner", "Welcome\n")
    run.programs.write("suffix", ";alpha")
    run.start(STOP)
    assert [event["job_id"] for event in run.events("submitted")] == ["1"]


def test_when_slurm_takes_neither_the_run_says_that_nothing_will_start_it(run: Run) -> None:
    run.programs.write("requeue", "exit 1")
    run.programs.write("refusal", "sbatch: error: no\n")
    run.start(STOP)
    assert run.end == ("stopped", "none")
    assert f"slurmddp resume {run.folder.name}" in (run.folder.log_dir(0) / "batch.log").read_text()
