"""A run after an attempt: its job is requeued, a new job is submitted, or the job leaves the queue."""

from __future__ import annotations

import pytest

from slurmddp.batch.attempt import read_settings
from slurmddp.slurm.command import CommandResult
from support.slurm.batch_run import (
    ENDING,
    FINISH,
    RUNNING,
    STOP,
    STOP_ASKED,
    TRAIN,
    Run,
    Step,
    exits,
    records,
    refused,
)

NO_REQUEUE = RUNNING.replace("Requeue=1", "Requeue=0")
GRANTED = ENDING.replace("Restarts=0", "Restarts=1")


def test_a_job_that_may_not_requeue_submits_a_new_one(run: Run) -> None:
    run.slurm.job = NO_REQUEUE
    leaked = {"SLURM_CPU_BIND": "x", "SBATCH_TIMELIMIT": "1", "SRUN_DEBUG": "1", "PMI_RANK": "1"}
    run.start(STOP, SLURM_CONF="/c", **leaked)
    assert run.end == ("stopped", "resubmit")
    assert run.asked() == ["sbatch"]
    (submitted,) = run.events("submitted")
    assert submitted | {"time": 0} == {
        "event": "submitted", "time": 0, "job_id": "1", "submitter": "sbatch", "resubmitted": True,
    }  # fmt: skip
    (call,) = run.submissions()
    assert call[-3:] == [str(run.folder.script_file), "resubmitted", "slurmddp:after-41-0"]
    assert not [word for word in call if word.startswith("--comment")], "the script has the person's comment"
    assert "--dependency=afterany:41" in call
    assert set(run.slurm.submitted_with) == {"SLURM_CONF"}


@pytest.mark.parametrize("is_held", [True, False])
def test_a_new_job_waits_for_no_begin_time_and_is_not_held(run: Run, is_held: bool) -> None:
    """Both delayed the first job, and would not delay a requeued one again."""
    run.slurm.job = NO_REQUEUE
    held = "#SBATCH --hold\n" if is_held else ""
    run.folder.script_file.write_text(f"#!/bin/bash\n#SBATCH --begin=now+2hours\n{held}")
    run.start(STOP)
    (call,) = run.submissions()
    assert "--begin=now" in call
    assert [call[1:] for call in run.slurm.of("release")] == ([["release", "1"]] if is_held else [])


def test_a_refused_requeue_becomes_a_new_submission(run: Run) -> None:
    words = "Requested operation is presently disabled for job 41"
    run.slurm.on["requeue"] = lambda: refused(words)
    run.start(STOP)
    assert run.asked()[-1] == "sbatch"
    assert words in run.log()
    assert [event["job_id"] for event in run.events("submitted")] == ["1"]


@pytest.mark.parametrize("script", ["/runs/other/job.sbatch", "(null)"])
def test_another_job_with_the_id_of_this_one_is_not_requeued(run: Run, script: str) -> None:
    """A controller that lost its state starts with id 1 again."""
    run.slurm.job = f"{GRANTED} JobName=other Command={script} WorkDir=/x"
    run.start(STOP)
    assert run.asked() == ["sbatch"]
    assert [event["job_id"] for event in run.events("submitted")] == ["1"]
    assert not [word for word in run.submissions()[0] if word.startswith("--dependency")]
    assert "has given the id 41 to another job" in run.log()


@pytest.mark.parametrize(
    "own",
    [
        "JobName=renamed Command={script} resubmitted WorkDir=/x",
        "JobName={name} Command=(null) WorkDir=/x",
    ],
)
def test_a_job_is_recognized_by_its_script_or_by_its_name(run: Run, own: str) -> None:
    name = read_settings(run.folder).name
    run.slurm.job = f"{RUNNING} {own.format(script=run.folder.script_file, name=name)}"
    run.start(STOP)
    assert run.asked() == ["requeue 41"]


@pytest.mark.parametrize("job", [GRANTED, "JobState=PENDING Restarts=0"], ids=["granted", "pending"])
def test_a_request_that_was_granted_though_its_answer_was_lost_is_enough(run: Run, job: str) -> None:
    def grant() -> CommandResult:
        run.slurm.job = job
        return refused()

    run.slurm.on["requeue"] = grant
    run.start(STOP)
    assert run.asked() == ["requeue 41"]


def test_a_requeue_that_is_seen_only_at_the_last_poll_is_enough(run: Run) -> None:
    def third() -> CommandResult:
        if len(run.slurm.of("requeue")) == 3:
            run.slurm.job = GRANTED
        return refused()

    run.slurm.on["requeue"] = third
    run.start(STOP)
    assert run.asked() == ["requeue 41"] * 3
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize(
    ("mark", "outcome"), [("stop", "stopped"), ("cancelled", "cancelled"), (None, "cancelled")]
)
def test_a_run_that_a_person_ends_while_slurm_refuses_is_not_submitted_again(
    run: Run, mark: str | None, outcome: str
) -> None:
    """None: by `scancel`."""

    def refuse() -> CommandResult:
        if mark is None:
            run.slurm.job = ENDING
        else:
            (run.folder.path / mark).touch()
        return refused()

    run.slurm.on["requeue"] = refuse
    assert run.start(STOP) == 75
    assert run.submissions() == []
    assert run.ends == [("stopped", "requeue"), (outcome, "none")]


# --- A run that is over ---


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the poll"])
@pytest.mark.parametrize("why", ["stop", "no progress", "failed"])
def test_a_job_that_slurm_requeued_leaves_the_queue_when_its_run_is_over(
    run: Run, why: str, late: bool
) -> None:
    run.slurm.jobs["41"] = "PENDING||"
    run.slurm.job = RUNNING + " PreemptTime=2026-01-01T00:00:00" if late else GRANTED
    if why == "no progress":
        run.start(TRAIN + exits(143))
    if late:
        asked = len(run.slurm.of("show", "job"))

        def requeue() -> None:
            if len(run.slurm.of("show", "job")) >= asked + 3:
                run.slurm.job = GRANTED

        run.slurm.on["show job"] = requeue
    steps = {"stop": STOP_ASKED + STOP, "no progress": TRAIN + STOP}
    run.start(steps.get(why, records({"exit_code": 78}) + exits(78)))
    assert run.end[1] == "none"
    assert run.slurm.jobs["41"].startswith("CANCELLED")


def test_a_job_that_slurm_did_not_requeue_ends_by_itself(run: Run) -> None:
    run.slurm.jobs["41"] = "RUNNING|n[1-2]|"
    run.slurm.job = RUNNING + " PreemptTime=2026-01-01T00:00:00"
    run.start(STOP_ASKED + STOP)
    assert (run.end, run.slurm.jobs["41"]) == (("stopped", "none"), "RUNNING|n[1-2]|")


# --- Resubmission ---


@pytest.mark.parametrize("queued_anyway", [True, False], ids=["found", "made again"])
@pytest.mark.parametrize(
    ("shows_arguments", "shows_submissions"),
    [(True, True), (False, False), (False, True)],
    ids=["22.05", "24.11", "26.05"],
)
def test_a_submission_that_timed_out_gives_one_job(
    run: Run, shows_arguments: bool, shows_submissions: bool, queued_anyway: bool
) -> None:
    run.slurm.job, run.slurm.lost_submissions, run.slurm.queued_anyway = NO_REQUEUE, 1, queued_anyway
    run.slurm.shows_arguments, run.slurm.shows_submissions = shows_arguments, shows_submissions
    run.start(STOP)
    assert len(run.submissions()) == 2 - queued_anyway
    assert [event["job_id"] for event in run.events("submitted")] == ["1"]


def test_a_damaged_record_gives_no_second_job(run: Run) -> None:
    run.slurm.job, run.slurm.lost_submissions, run.slurm.queued_anyway = NO_REQUEUE, 1, True
    run.slurm.shows_arguments = run.slurm.shows_submissions = False
    run.on_sleep = lambda: run.folder.attempts_file.write_text("damaged\n")
    run.start(STOP)
    assert len(run.submissions()) == 1


def test_a_queue_that_cannot_be_read_gets_no_second_job(run: Run) -> None:
    run.slurm.job, run.slurm.lost_submissions, run.slurm.queued_anyway = NO_REQUEUE, 1, True

    def falls_silent() -> None:
        run.slurm.silent_queue = 9

    run.on_sleep = falls_silent
    run.start(STOP)
    assert len(run.submissions()) == 1
    assert run.end == ("stopped", "none")


def test_when_slurm_takes_neither_the_run_says_that_nothing_will_start_it(run: Run) -> None:
    run.slurm.on["requeue"] = refused
    run.slurm.refusal = "sbatch: error: no"
    run.start(STOP)
    assert run.end == ("stopped", "none")
    assert f"slurmddp resume {run.folder.name}" in run.log()
    assert "sbatch: error: no" in run.log()


# --- Expedited requeues: SLURM requeues each script that fails, and holds the job ---

EXPEDITED = f"{RUNNING} ExpeditedRequeue=Yes"
NO_MORE = "update JobId=41 Requeue=0"


@pytest.mark.parametrize(
    ("job", "step", "asked"),
    [
        (EXPEDITED, exits(1), [NO_MORE]),
        (EXPEDITED, STOP_ASKED + STOP, [NO_MORE]),
        (EXPEDITED.replace("Requeue=1", "Requeue=0"), STOP, [NO_MORE, "sbatch"]),
        (EXPEDITED, STOP, ["requeue 41"]),
        (EXPEDITED, FINISH, []),
        (EXPEDITED.replace("RUNNING", "CANCELLED"), STOP, []),
        (EXPEDITED.replace("Restarts=0", "Restarts=1"), exits(1), []),
        (RUNNING, exits(1), []),
    ],
    ids=["failed", "stopped", "resubmitted", "requeued", "finished", "cancelled", "by slurm", "no expedite"],
)
def test_no_held_job_is_left_by_an_expedited_requeue(
    run: Run, job: str, step: Step, asked: list[str]
) -> None:
    run.slurm.job = job
    run.start(step)
    assert run.asked() == asked


def test_a_job_that_starts_nothing_is_not_left_held_either(run: Run) -> None:
    run.slurm.job = EXPEDITED
    assert run.begin(SLURM_ARRAY_JOB_ID="40") != 0
    assert run.asked() == [NO_MORE]


def test_a_job_that_slurm_would_hold_all_the_same_is_reported(run: Run) -> None:
    run.slurm.job = EXPEDITED
    run.slurm.on["update"] = lambda: refused("Access/permission denied")
    run.start(exits(1))
    assert "`scancel 41` removes it: Access/permission denied" in run.log()
