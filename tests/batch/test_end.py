"""The end of an attempt: what is decided, recorded and asked of SLURM, with every trace around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurmddp.runs.failures.read import read_failure
from support.slurm.batch_run import (
    ENDING,
    FINISH,
    GIVEN_UP,
    PREEMPTED,
    RUNNING,
    SAVE,
    STOP,
    STOP_ASKED,
    TRAIN,
    Killed,
    Run,
    Step,
    do,
    exits,
    leave,
    leaves,
    records,
    refused,
    saves,
    touches,
)

# --- The table of decisions, through events and files ---


@dataclass(frozen=True)
class Row:
    label: str
    exit_code: int
    outcome: str
    next: str
    failures: int = 0
    max_restarts: int = 3
    progressed: bool = False
    cancelled: bool = False
    requeue: bool = True
    stalls: int = 0
    without_progress: int = 0
    """Like the two above, with this attempt counted."""
    progressed_before: bool = False
    job_state: str = "running"
    asked: bool = False
    """Whether the ranks failed after they had been asked to stop."""


TABLE = (
    Row("finished", 0, "finished", "none", progressed=True),
    Row("finished without a checkpoint", 0, "finished", "none"),
    Row("finished although cancelled", 0, "finished", "none", cancelled=True),
    Row("finished after failures", 0, "finished", "none", failures=3, progressed=True),
    Row("configuration", 78, "config", "none"),
    Row("configuration after progress", 78, "config", "none", failures=1, progressed=True),
    Row("configuration of a cancelled run", 78, "config", "none", cancelled=True),
    Row("no progress", 79, "no_progress", "none"),
    Row("no progress of a cancelled run", 79, "no_progress", "none", cancelled=True),
    Row("stopped", 75, "stopped", "requeue", progressed=True),
    Row("stopped before its first checkpoint", 75, "stopped", "requeue"),
    Row("stopped after many failures", 75, "stopped", "requeue", failures=9, progressed=True),
    Row("stopped with no restarts allowed", 75, "stopped", "requeue", max_restarts=0, progressed=True),
    Row("stopped and must not requeue", 75, "stopped", "none", progressed=True, requeue=False),
    Row("stopped because cancelled", 75, "cancelled", "none", progressed=True, cancelled=True),
    Row("stopped once at the step it began with", 75, "stopped", "requeue", stalls=1),
    Row("stopped twice at the step it began with", 75, "no_progress", "none", stalls=2),
    Row("stopped twice and must not requeue", 75, "stopped", "none", stalls=2, requeue=False),
    Row("stopped twice because cancelled", 75, "cancelled", "none", stalls=2, cancelled=True),
    Row("third time limit", 75, "stopped", "requeue", without_progress=3),
    Row("fourth time limit", 75, "no_progress", "none", without_progress=4),
    Row("fourth time limit, must not requeue", 75, "stopped", "none", without_progress=4, requeue=False),
    Row("fourth time limit, cancelled", 75, "cancelled", "none", without_progress=4, cancelled=True),
    Row("first failure", 1, "failed", "requeue", failures=1, progressed=True),
    Row("last failure allowed", 1, "failed", "requeue", failures=3, progressed=True),
    Row("one failure too many", 1, "failed", "none", failures=4, progressed=True),
    Row("failure without progress", 1, "failed", "none", failures=1),
    Row("failure after progress", 1, "failed", "requeue", failures=1, progressed_before=True),
    Row("killed after progress", 137, "failed", "requeue", failures=3, progressed_before=True),
    Row("one failure too many after progress", 1, "failed", "none", failures=4, progressed_before=True),
    Row("stopped twice after progress", 75, "no_progress", "none", stalls=2, progressed_before=True),
    Row("failure with no restarts allowed", 1, "failed", "none", failures=1, max_restarts=0, progressed=True),
    Row("failure and must not requeue", 1, "failed", "none", failures=1, progressed=True, requeue=False),
    Row("failure of a cancelled run", 1, "cancelled", "none", failures=1, progressed=True, cancelled=True),
    Row("killed", 137, "failed", "requeue", failures=1, progressed=True),
    Row("killed without progress", 137, "failed", "none", failures=1),
    Row("killed by scancel", 137, "cancelled", "none", failures=1, progressed=True, cancelled=True),
    Row("terminated", 143, "failed", "requeue", failures=2, progressed=True),
    Row("out of memory as srun says it", 253, "failed", "requeue", failures=1, progressed=True),
    Row("a node was not fit", 76, "failed", "requeue", failures=1),
    Row("too many nodes were not fit", 76, "failed", "none", failures=4),
    Row("a node was not fit and must not requeue", 76, "failed", "none", failures=1, requeue=False),
    Row("a node was not fit for a cancelled run", 76, "cancelled", "none", failures=1, cancelled=True),
    Row("usage error", 2, "failed", "none", failures=1),
    Row("killed by a preemption", 143, "stopped", "requeue", job_state="preempted"),
    Row("failed while SLURM put the job back", 1, "stopped", "requeue", job_state="requeued"),
    Row("failed as SLURM lost a node", 1, "stopped", "requeue", job_state="node_fail"),
    Row("preempted and must not requeue", 143, "stopped", "none", job_state="preempted", requeue=False),
    Row("finished though SLURM put the job back", 0, "finished", "none", job_state="requeued"),
    Row("stopped by scancel", 75, "cancelled", "none", progressed=True, job_state="cancelled"),
    Row("finished before scancel", 0, "finished", "none", job_state="cancelled"),
    Row("killed at the time limit", 137, "failed", "none", failures=1, job_state="timeout"),
    Row("preemptions are not counted", 75, "stopped", "requeue", without_progress=9, job_state="preempted"),
    Row(
        "stopped twice by preemptions in training", 75, "no_progress", "none", stalls=2, job_state="preempted"
    ),
    Row("saved at a stop and failed", 1, "stopped", "requeue", max_restarts=0, progressed=True, asked=True),
    Row("saved at a stop, after failures", 1, "stopped", "requeue", failures=9, progressed=True, asked=True),
    Row(
        "saved at the limit and was killed",
        137,
        "stopped",
        "requeue",
        progressed=True,
        asked=True,
        job_state="timeout",
    ),
    Row(
        "saved at a stop, must not requeue", 1, "stopped", "none", progressed=True, asked=True, requeue=False
    ),
    Row("saved at a cancel and failed", 1, "cancelled", "none", progressed=True, asked=True, cancelled=True),
    Row("refused a value at a stop", 78, "config", "none", progressed=True, asked=True),
    Row("saved nothing at a stop and failed", 1, "failed", "none", failures=1, asked=True),
    Row(
        "saved nothing at a stop, once before",
        1,
        "failed",
        "requeue",
        failures=1,
        asked=True,
        progressed_before=True,
    ),
)


def add_before(run: Run, row: Row) -> None:
    """Let the attempts before have left what the row counts."""
    before = [{"outcome": "failed"}] * (row.failures - 1)
    before += [{"outcome": "stopped", "stalled_at": ""}] * (row.stalls - 1)
    before += [{"outcome": "stopped", "without_progress": one} for one in range(1, row.without_progress)]
    before += [{"outcome": "stopped", "progressed": True}] if row.progressed_before else []
    for facts in before:
        run.folder.add_event("ended", attempt=0, job_id="40", exit_code=1, next="requeue", **facts)


FAILED_AT_STOP = records({"exit_code": 1, "asked_to_stop": True}) + exits(1)
JOB_OF = {
    "running": RUNNING,
    "preempted": ENDING + " PreemptTime=2026-01-01T00:00:00",
    "requeued": PREEMPTED,
    "node_fail": RUNNING.replace("RUNNING", "NODE_FAIL"),
    "cancelled": ENDING,
    "timeout": RUNNING.replace("RUNNING", "TIMEOUT"),
}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.label)
def test_the_batch_step_decides_as_the_table_says(tmp_path: Path, row: Row) -> None:
    run = Run(tmp_path, max_restarts=row.max_restarts, requeue=row.requeue)
    run.slurm.job = JOB_OF[row.job_state]
    add_before(run, row)
    step = (TRAIN if row.stalls else Step()) + (SAVE if row.progressed else Step())
    step += touches("cancelled") if row.cancelled else Step()
    if row.asked:
        step += records({"exit_code": row.exit_code, "asked_to_stop": True})
    step += {0: FINISH, 75: STOP}.get(row.exit_code, exits(row.exit_code))
    assert run.start(step) == (79 if row.outcome == "no_progress" else row.exit_code)
    assert run.end == (row.outcome, row.next)
    wanted = row.next == "requeue" and row.job_state != "requeued"
    assert run.asked() == ["requeue 41"] * wanted


def test_an_attempt_is_recorded_from_start_to_end(run: Run) -> None:
    assert run.start() == 0
    (started,), (ended,) = run.events("started"), run.events("ended")
    assert started.pop("time") <= ended.pop("time")
    assert started == {"event": "started", "attempt": 0, "job_id": "41", "restart_count": 0,
                       "nodes": "n[1-2]", "launcher": "slurm"}  # fmt: skip
    assert ended == {"event": "ended", "attempt": 0, "job_id": "41", "exit_code": 0,
                     "outcome": "finished", "next": "none"}  # fmt: skip
    assert "Attempt 0: finished" in run.log()


@pytest.mark.parametrize("step", [FINISH, STOP, SAVE + exits(1)], ids=["finished", "stopped", "failed"])
def test_an_attempt_after_which_another_began_neither_ends_nor_requeues_the_run(run: Run, step: Step) -> None:
    assert run.start(do(lambda run: run.folder.log_dir(1).mkdir()) + step) == 79
    assert run.events("ended") == []
    assert run.asked() == []
    assert "A later attempt has begun" in run.log()


def test_the_end_is_recorded_before_slurm_is_asked_to_requeue(run: Run) -> None:
    seen: list[str] = []
    run.slurm.on["requeue"] = lambda: seen.append(run.folder.events()[-1]["next"])
    run.start(STOP)
    assert seen == ["requeue"]


@pytest.mark.parametrize(
    ("job", "step", "reason"),
    [
        (RUNNING.replace("00:05:00", "00:57:00"), STOP, "time limit"),
        (RUNNING, STOP, None),
        (JOB_OF["timeout"], SAVE + STOP, "time limit"),
        (JOB_OF["preempted"], STOP, "preempted"),
        (RUNNING.replace("00:05:00", "00:57:00"), STOP_ASKED + STOP, "on request"),
        (RUNNING.replace("00:05:00", "00:57:00"), SAVE + exits(1), None),
        (RUNNING.replace("00:05:00", "00:57:00"), SAVE + FAILED_AT_STOP, "time limit"),
        (RUNNING, STOP_ASKED + SAVE + FAILED_AT_STOP, "on request"),
    ],
    ids=[
        *("near its limit", "by itself", "at its limit", "preempted", "asked", "failed"),
        *("failed at its limit", "failed as it was asked"),
    ],
)
def test_the_end_of_a_stopped_attempt_names_the_reason(
    tmp_path: Path, job: str, step: Step, reason: str | None
) -> None:
    """A plain script records no signal, so that only the batch step can say why it stopped."""
    run = Run(tmp_path, requeue=False)
    run.slurm.job = job
    run.start(step)
    (ended,) = run.events("ended")
    assert ended.get("reason") == reason


@pytest.mark.parametrize("step", [STOP, SAVE + exits(1)], ids=["stopped", "failed"])
def test_a_run_that_a_person_stopped_is_not_requeued(run: Run, step: Step) -> None:
    run.start(STOP_ASKED + step)
    assert run.end == ("stopped" if step is STOP else "failed", "none")
    assert run.asked() == []


@pytest.mark.parametrize(("other", "stopped"), [({}, True), ({1: 1}, False)], ids=["not begun", "failed"])
def test_a_person_who_stops_a_run_need_not_wait_for_agents_that_have_not_begun(
    run: Run, other: dict[int, int], stopped: bool
) -> None:
    """The first agent leaves with 75 while another still starts Python; srun then ends that one."""
    run.start(STOP_ASKED + leave({0: 75, **other}, 143))
    assert run.end == ("stopped" if stopped else "failed", "none")


def test_a_job_whose_requeue_was_refused_resumes_if_slurm_restarts_it(tmp_path: Path) -> None:
    run = Run(tmp_path, max_restarts=2)
    run.slurm.on["requeue"] = refused
    run.slurm.refusal = "sbatch: error: no"
    run.start(SAVE + exits(1))
    assert run.end == ("failed", "none")
    run.start(saves(10) + exits(1), SLURM_RESTART_COUNT="1")
    assert [event["attempt"] for event in run.events("started")] == [0, 1]
    assert [then for _, then in run.ends] == ["requeue", "none"] * 2, "each counted once"


def is_killed_at(run: Run, seconds: float) -> Callable[[], None]:
    def wait() -> None:
        if run.slept[-1] == seconds:
            raise Killed

    return wait


@pytest.mark.parametrize(
    "step", [exits(137), FINISH, do(lambda run: run.folder.log_dir(1).mkdir()) + exits(1)]
)
def test_on_a_host_that_slurm_has_given_up_the_step_waits_to_be_ended(run: Run, step: Step) -> None:
    """Had it ended when the host reports back, SLURM would drain the node and hold the job."""
    run.slurm.job = GIVEN_UP
    run.on_sleep = is_killed_at(run, 600)
    assert run.start(step, SLURMD_NODENAME="n1") == -15
    assert "waits until SLURM ends it" in run.log()
    assert len(run.events("ended")) == (not run.folder.log_dir(1).exists())


def test_on_a_host_that_still_has_the_job_slurm_waits_for_the_script(run: Run) -> None:
    run.slurm.job = ENDING.replace("Restarts=0", "Restarts=1") + " NodeList=n[1-2]"
    run.on_sleep = is_killed_at(run, 600)
    assert run.start(STOP, SLURMD_NODENAME="n1") == 75


# --- Setup lines and a full disk ---


@pytest.mark.parametrize("code", [0, 3, 75, 76, 78, 79, 128, 143, 255])
def test_the_code_of_a_setup_line_has_no_meaning_of_a_rank(tmp_path: Path, code: int) -> None:
    run = Run(tmp_path, setup=("module load cuda",))
    assert run.start(exits(code)) == (3 if code == 3 else 1)
    assert run.end == ("failed", "none")
    assert "before any rank was started" in run.log()
    assert run.slept == [], "no agent is waited for"


def test_once_the_setup_lines_are_through_the_code_is_of_the_ranks(tmp_path: Path) -> None:
    run = Run(tmp_path, setup=("module load cuda",))
    assert run.start(leaves("set-up") + STOP) == 75


def test_a_full_disk_keeps_no_run_from_its_requeue(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    step = do(lambda run: monkeypatch.setattr(run.folder, "add_event", full)) + STOP
    assert run.start(step) == 75
    assert run.asked() == ["requeue 41"]
    assert "`ended` was not recorded" in run.log()


def test_a_damaged_record_keeps_no_run_from_its_end(run: Run) -> None:
    run.folder.attempts_file.write_text("nonsense\n")
    run.start(STOP)
    line = run.folder.attempts_file.read_text().splitlines()[-1]
    assert json.loads(line)["outcome"] == "stopped"


def test_agents_that_srun_never_started_are_not_called_lost(run: Run) -> None:
    run.start(exits(1))
    assert read_failure(run.folder, 0) is None
