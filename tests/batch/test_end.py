"""The end of an attempt: what is decided, recorded and asked of SLURM, with every trace around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.runs.failures.read import read_failure
from support.runs.outcome_table import TABLE, Row
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
    refused,
    saves,
    touches,
)

# --- The table of decisions, through events and files ---


def add_before(run: Run, row: Row) -> None:
    """Let the attempts before have left what the row counts."""
    before = [{"outcome": "failed"}] * (row.failures - 1)
    before += [{"outcome": "stopped", "stalled_at": ""}] * (row.stalls - 1)
    before += [{"outcome": "stopped", "without_progress": one} for one in range(1, row.without_progress)]
    before += [{"outcome": "stopped", "progressed": True}] if row.progressed_before else []
    for facts in before:
        run.folder.add_event("ended", attempt=0, job_id="40", exit_code=1, next="requeue", **facts)


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
    run.slurm.job = JOB_OF[row.fate]
    add_before(run, row)
    step = (TRAIN if row.stalls else Step()) + (SAVE if row.progressed else Step())
    step += touches("cancelled") if row.cancelled else Step()
    step += {0: FINISH, 75: STOP}.get(row.exit_code, exits(row.exit_code))
    assert run.start(step) == (79 if row.outcome == "no_progress" else row.exit_code)
    assert run.end == (row.outcome, row.next)
    wanted = row.next == "requeue" and row.fate != "requeued"
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
    assert "a later one has begun" in run.log()


def test_the_end_is_recorded_before_slurm_is_asked_to_requeue(run: Run) -> None:
    seen: list[str] = []
    run.slurm.on["requeue"] = lambda: seen.append(run.folder.events()[-1]["next"])
    run.start(STOP)
    assert seen == ["requeue"]


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
    assert "waiting to be ended by it" in run.log()
    assert len(run.events("ended")) == (not run.folder.log_dir(1).exists())


def test_a_script_that_slurm_is_ending_already_does_not_wait_for_that(run: Run) -> None:
    run.slurm.job = GIVEN_UP
    assert run.start(exits(137), terminated=True, SLURMD_NODENAME="n1") == 137
    assert "waiting to be ended" not in run.log()


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
    assert "ended was not recorded" in run.log()


def test_a_damaged_record_keeps_no_run_from_its_end(run: Run) -> None:
    run.folder.attempts_file.write_text("nonsense\n")
    run.start(STOP)
    line = run.folder.attempts_file.read_text().splitlines()[-1]
    assert json.loads(line)["outcome"] == "stopped"


def test_agents_that_srun_never_started_are_not_called_lost(run: Run) -> None:
    run.start(exits(1))
    assert read_failure(run.folder, 0) is None
