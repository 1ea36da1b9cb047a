"""The job's state for SLURM at the end of an attempt, and the commands that ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.batch import slurm_job
from slurmddp.batch.slurm_job import ask_at_once
from slurmddp.slurm.command import CommandResult
from support.slurm.batch_run import (
    ENDING,
    GIVEN_UP,
    PARTITION,
    RUNNING,
    SAVE,
    SILENCE,
    STOP,
    Run,
    Step,
    do,
    exits,
)

IN_GRACE = " PreemptTime=2026-01-01T00:00:00"
STOPPED_OR_KILLED = pytest.mark.parametrize("step", [STOP, exits(143)], ids=["stopped", "killed"])


@pytest.mark.parametrize("step", [STOP, exits(143), exits(137), exits(1)], ids=["stopped", "143", "137", "1"])
@pytest.mark.parametrize(
    ("job", "asked"),
    [
        (ENDING.replace("Restarts=0", "Restarts=1"), []),
        (ENDING + IN_GRACE, ["requeue 41"]),
        (RUNNING.replace("RUNNING", "PREEMPTED"), ["requeue 41"]),
        (ENDING.replace("Reason=None", "Reason=NodeDown"), ["requeue 41"]),
        (RUNNING.replace("RUNNING", "NODE_FAIL"), ["requeue 41"]),
    ],
    ids=["requeued", "preempted and ending", "preempted", "node down", "node failed"],
)
def test_ranks_that_slurm_ended_have_not_failed(run: Run, step: Step, job: str, asked: list[str]) -> None:
    run.slurm.job = job
    run.start(step)
    assert run.end == ("stopped", "requeue")
    assert run.asked() == asked


@pytest.mark.parametrize("after", ["WorkDir=/x", "SubmitLine=sbatch --array=0-1%1 {script} WorkDir=/x"])
def test_an_element_is_recognized_by_the_script_of_its_array(tmp_path: Path, after: str) -> None:
    """Newer versions of SLURM print the whole sbatch line after the path of the script."""
    array = tmp_path / "my runs" / ".sweep.1"
    array.mkdir(parents=True)
    (array / "elements").write_text("gpt-1\ngpt-2\n")
    script = array / "job.sbatch"
    text = f"JobId=9 JobName=renamed JobState=RUNNING Command={script} {after.format(script=script)}"
    variables = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"}

    def is_forgotten(name: str) -> bool:
        job = slurm_job.SlurmJob(variables, command=lambda *_: CommandResult(0, text), names=[name])
        job.poll()
        return job.is_forgotten

    assert not is_forgotten("gpt-2") and is_forgotten("gpt-1")


def test_a_requeue_is_seen_by_a_higher_count_than_at_the_start(run: Run) -> None:
    run.slurm.job = RUNNING.replace("Restarts=0", "Restarts=3")
    assert [run.start(exits(1), SLURM_RESTART_COUNT=count) for count in ("2", "3")] == [1, 1]
    assert run.ends == [("stopped", "requeue"), ("failed", "none")]


@pytest.mark.parametrize(
    "job",
    [
        ENDING,
        ENDING + " PreemptTime=None",
        ENDING.replace("01:00:00", "UNLIMITED"),
        RUNNING.replace("RUNNING", "CANCELLED"),
        RUNNING.replace("RUNNING", "CANCELLED") + IN_GRACE,
    ],
)
@STOPPED_OR_KILLED
def test_a_job_that_was_cancelled_with_scancel_stays_cancelled(run: Run, job: str, step: Step) -> None:
    run.slurm.job = job
    run.start(SAVE + step)
    assert run.end == ("cancelled", "none")
    assert run.asked() == []


@pytest.mark.parametrize(
    ("requeue", "kind", "mode", "expected"),
    [
        (1, "preempt/partition_prio", "REQUEUE", ("cancelled", "none")),
        (1, "preempt/partition_prio", "PRIORITY,REQUEUE", ("cancelled", "none")),  # SLURM 26
        (1, "preempt/partition_prio", "GANG,REQUEUE", ("cancelled", "none")),
        (1, "preempt/partition_prio", "CANCEL", ("stopped", "requeue")),
        (1, "preempt/partition_prio", "PRIORITY,CANCEL", ("stopped", "requeue")),
        (1, "preempt/partition_prio", "WITHIN,REQUEUE", ("cancelled", "none")),
        (0, "preempt/partition_prio", "REQUEUE", ("stopped", "resubmit")),  # SLURM cancels those
    ],
)
@STOPPED_OR_KILLED
def test_a_scancel_during_the_grace_of_a_preemption_is_one(
    run: Run, step: Step, requeue: int, kind: str, mode: str, expected: tuple[str, str]
) -> None:
    run.slurm.job = ENDING.replace("Requeue=1", f"Requeue={requeue}") + IN_GRACE
    run.slurm.config = f"PreemptMode             = REQUEUE\nPreemptType             = {kind}\n"
    run.slurm.partition = f"{PARTITION} PreemptMode={mode}\n"
    run.start(step, SLURM_JOB_PARTITION="low")
    assert run.end == expected


@pytest.mark.parametrize(
    ("of_qos", "of_all", "expected"),
    [
        ("requeue", "CANCEL", ("cancelled", "none")),
        ("priority,requeue", "CANCEL", ("cancelled", "none")),  # from SLURM 25.05 on
        ("cancel", "REQUEUE", ("stopped", "requeue")),
        ("cluster", "REQUEUE", ("cancelled", "none")),
        ("cluster", "GANG,REQUEUE", ("cancelled", "none")),
        ("cluster", "CANCEL", ("stopped", "requeue")),
        (None, "REQUEUE", ("stopped", "requeue")),  # the database does not answer
    ],
)
def test_where_a_qos_is_preempted_its_mode_shows_what_ended_the_job_in_the_grace_time(
    run: Run, of_qos: str | None, of_all: str, expected: tuple[str, str]
) -> None:
    run.slurm.job = ENDING + IN_GRACE
    run.slurm.config = f"PreemptMode             = {of_all}\nPreemptType             = preempt/qos\n"
    run.slurm.partition = f"{PARTITION} PreemptMode=CANCEL\n"
    run.slurm.qos = {} if of_qos is None else {"PreemptMode": of_qos}
    run.start(STOP, SLURM_JOB_PARTITION="low", SLURM_JOB_QOS="cheap")
    assert run.end == expected


@pytest.mark.parametrize(
    "times",
    [
        "RunTime=01:00:05 TimeLimit=01:00:00",
        "RunTime=1-00:00:31 TimeLimit=1-00:00:00",
        "RunTime=08:09:08 TimeLimit=08:09:00",
    ],
)
def test_a_job_at_its_time_limit_is_requeued(run: Run, times: str) -> None:
    run.slurm.job = ENDING.partition(" RunTime")[0] + " " + times
    assert run.start(STOP) == 75
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize(
    ("step", "code", "end"),
    [
        (SAVE + exits(137), 75, ("stopped", "requeue")),
        (SAVE + exits(0), 75, ("stopped", "requeue")),
        (SAVE + exits(1), 1, ("failed", "requeue")),
        (exits(137), 137, ("failed", "none")),
    ],
)
def test_a_job_killed_at_its_time_limit_is_requeued_if_it_had_saved(
    run: Run, step: Step, code: int, end: tuple[str, str]
) -> None:
    run.slurm.job = RUNNING.replace("RUNNING", "TIMEOUT")
    assert run.start(step) == code
    assert run.end == end


# --- A controller that does not answer ---


def test_a_controller_that_does_not_answer_changes_nothing(run: Run) -> None:
    run.slurm.job = "down"
    run.start(STOP)
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["requeue 41"]


def silence(run: Run) -> None:
    run.slurm.silence = SILENCE


@pytest.mark.parametrize("silent", [1, 25])
def test_a_controller_that_is_away_for_a_while_is_asked_again(run: Run, silent: int) -> None:
    """A host that is cut off can't ask; a requeue by SLURM meanwhile must not count as a failure."""
    run.slurm.job = GIVEN_UP

    def comes_back() -> None:
        run.slurm.silence = SILENCE if len(run.slept) < silent else ""

    run.on_sleep = comes_back
    run.start(do(silence) + exits(1))
    assert run.end == ("stopped", "requeue")
    assert run.asked() == []


def test_a_controller_that_stays_away_is_asked_for_a_quarter_of_an_hour(run: Run) -> None:
    run.slurm.refusal = "sbatch: error: no"
    run.start(SAVE + do(silence) + exits(1))
    assert run.end == ("failed", "none")
    assert 900 < sum(run.slept) < 3000


def test_questions_are_asked_side_by_side_and_a_late_answer_is_left_out() -> None:
    import threading

    together, never = threading.Barrier(2), threading.Event()

    def first() -> str:
        return f"with {together.wait(120) in (0, 1)}"

    found = ask_at_once({"a": first, "b": first}, limit_s=120)()
    assert found == {"a": "with True", "b": "with True"}
    assert ask_at_once({"late": lambda: never.wait(20)}, limit_s=0.05)() == {}
    never.set()
