"""What the batch step takes an attempt's end for: by its agents, by SLURM, by the attempts before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.config.schema import OWN_TRAINER
from slurmddp.runs.failures.model import read_failure
from slurmddp.spec import Program
from support.runs.outcome_table import PROGRESS, TABLE, Row
from support.slurm.batch_run import (
    ENDING,
    FINISH,
    GIVEN_UP,
    PARTITION,
    PREEMPTED,
    RUNNING,
    SAVE,
    SILENCE,
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


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


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


@pytest.mark.parametrize(("before", "after", "progress"), PROGRESS)
def test_progress_is_a_later_checkpoint(run: Run, before: str, after: str, progress: bool) -> None:
    latest = run.folder.checkpoints_dir / "latest"
    latest.parent.mkdir()
    latest.write_text(before + "\n")
    run.start(do(lambda _: latest.write_text(after + "\n")) + exits(1))
    assert run.end == ("failed", "requeue" if progress else "none")


@pytest.mark.parametrize(("facts", "then"), [({}, "requeue"), ({"resubmitted": True}, "none")])
def test_a_person_who_submits_again_gives_the_run_its_restarts_back(
    tmp_path: Path, facts: dict[str, Any], then: str
) -> None:
    run = Run(tmp_path, max_restarts=1)
    run.folder.add_event("ended", attempt=0, job_id="40", exit_code=1, outcome="failed", next="none")
    run.folder.add_event("submitted", job_id="41", submitter="sbatch", **facts)
    run.start(SAVE + exits(1))
    assert run.end == ("failed", then)


def test_a_run_that_has_progressed_survives_one_failure_without_progress_but_not_two(run: Run) -> None:
    """A bad node at a requeue costs one more attempt; a bug at one step is not repeated further."""
    for step in (SAVE + STOP, exits(1), STOP, exits(1)):
        run.start(step)
    assert [then for _, then in run.ends] == ["requeue", "requeue", "requeue", "none"]
    assert [event.get("progressed") for event in run.events("ended")] == [True, None, None, None]


def test_progress_after_a_failure_without_progress_allows_another_one(tmp_path: Path) -> None:
    run = Run(tmp_path, max_restarts=5)
    for step in (SAVE + exits(1), exits(1), saves(10) + exits(1), exits(1)):
        run.start(step)
    assert run.ends == [("failed", "requeue")] * 4


@pytest.mark.parametrize(("facts", "then"), [({}, "none"), ({"resubmitted": True}, "requeue")])
def test_progress_before_a_person_submitted_the_run_counts_no_more(
    run: Run, facts: dict[str, Any], then: str
) -> None:
    run.start(SAVE + STOP)
    run.folder.add_event("submitted", job_id="41", **facts)
    run.start(exits(1))
    assert run.end == ("failed", then)


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
def test_a_run_that_a_person_stopped_is_not_put_back(run: Run, step: Step) -> None:
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


# --- Traces behind srun's code ---


@pytest.mark.parametrize("code", [0, 1, 75, 137, 143])
def test_a_recorded_failure_is_a_failure_whatever_srun_says(run: Run, code: int) -> None:
    exit_code = run.start(records({"rank": 3, "exit_code": None, "signal": "SIGKILL"}) + exits(code))
    assert exit_code not in (0, 75)
    assert run.end == ("failed", "none")


@pytest.mark.parametrize(("code", "outcome"), [(78, "config"), (79, "no_progress")])
def test_a_refusal_is_kept_though_srun_killed_the_other_agents(run: Run, code: int, outcome: str) -> None:
    assert run.start(records({"exit_code": code, "signal": None}) + exits(143)) == code
    assert run.end == (outcome, "none")


def test_an_output_of_a_rank_is_not_taken_for_its_code(run: Run) -> None:
    assert run.start(records({"exit_code": 1, "last_lines": ['"exit_code": 78']}) + exits(1)) == 1
    assert run.end == ("failed", "none")


def test_a_record_that_was_cut_short_is_a_failure(run: Run) -> None:
    run.start(do(lambda run: (run.log_dir / "failure.json").write_text('{"exit_co')) + exits(0))
    assert run.end == ("failed", "none")


def test_a_stop_of_all_is_kept_though_srun_killed_an_agent_that_was_leaving(run: Run) -> None:
    assert run.start(leave({0: 75, 1: 75}, 143)) == 75
    assert run.end == ("stopped", "requeue")


def test_an_agent_that_had_finished_is_no_obstacle_to_a_stop(run: Run) -> None:
    run.start(leave({0: 0, 1: 75}, 75))
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize("code", [75, 137, 143])
@pytest.mark.parametrize("other", [{}, {1: 1}], ids=["silent", "failed"])
def test_an_agent_that_died_is_a_failure_though_srun_made_the_others_stop(
    run: Run, code: int, other: dict[int, int]
) -> None:
    assert run.start(leave({0: 75, **other}, code)) not in (0, 75)
    assert run.end == ("failed", "none")


@pytest.mark.parametrize("codes", [{}, {0: 0}], ids=["none", "of the first"])
def test_srun_that_ends_with_0_without_the_code_of_every_agent_is_not_the_end(
    run: Run, codes: dict[int, int]
) -> None:
    """So it does when SLURM has given a node up and the others do not end in time."""
    assert run.start(SAVE + leaves("node-0.log", "node-1.log") + leave(codes, 0)) == 1
    assert run.end == ("failed", "requeue")
    assert run.asked() == ["requeue 41"]
    assert "The agent of node 1 (n2) left no exit code." in run.log()
    assert ("The agent of node 0 (n1) left no exit code." in run.log()) == (not codes)


def test_srun_that_ends_with_0_when_slurm_has_lost_a_node_is_no_failure(run: Run) -> None:
    run.slurm.job = ENDING.replace("Reason=None", "Reason=NodeDown")
    run.start(SAVE + leave({0: 0}, 0))
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize("other", [75, 0])
def test_srun_that_ends_with_0_hides_no_stop(run: Run, other: int) -> None:
    assert run.start(leave({0: 75, 1: other}, 0)) == 75
    assert run.end == ("stopped", "requeue")


def test_srun_that_ends_with_0_hides_no_failure(run: Run) -> None:
    assert run.start(leave({0: 0, 1: 3}, 0)) == 1
    assert run.end == ("failed", "none")


def test_a_code_that_is_seen_late_is_waited_for(run: Run) -> None:
    run.on_sleep = lambda: (run.log_dir / "exit-node-1").write_text("0\n")
    assert run.start(leave({0: 0}, 0)) == 0
    assert run.end == ("finished", "none")


@pytest.mark.parametrize(("other", "end"), [({1: 0}, ("finished", "none")), ({}, ("failed", "none")),
                                            ({1: 1}, ("failed", "none"))])  # fmt: skip
def test_a_step_that_ran_out_of_memory_ends_as_its_agents_say(
    run: Run, other: dict[int, int], end: tuple[str, str]
) -> None:
    """SLURM with task/cgroup then calls each task `Out Of Memory`, also after another rank took its place."""
    assert run.start(leave({0: 0, **other}, 1)) == (end[0] == "failed")
    assert run.end == end


def peer_lost(text: str) -> Step:
    """Return a step in which node 1's agent vanishes and a rank of node 0 ends with `text`."""
    record = {"rank": 0, "host": "n1", "exit_code": 1, "signal": None, "last_lines": [text]}
    return records(record) + leaves("node-0.log", "node-1.log") + leave({0: 1}, 137)


def test_an_agent_that_vanished_is_named_instead_of_the_rank_that_lost_it(run: Run) -> None:
    run.start(peer_lost("Connection closed by peer [10.0.0.2]"))
    failure = read_failure(run.folder, 0)
    assert failure is not None
    assert failure.sentence == "the agent on n2 left no word: it was killed, or its host is gone"
    assert "The agent of node 1 (n2) left no exit code." in run.log()
    (run.log_dir / "exit-node-1").write_text("1\n")  # seen late
    late = read_failure(run.folder, 0)
    assert late is not None and late.rank == 0


def test_a_rank_that_failed_by_itself_is_named_though_an_agent_left_no_code(run: Run) -> None:
    run.start(peer_lost("ValueError: mine"))
    failure = read_failure(run.folder, 0)
    assert failure is not None and failure.rank == 0


# --- SLURM's part in it ---


def test_a_job_that_slurm_put_back_itself_is_not_put_back_again(run: Run) -> None:
    run.slurm.job = ENDING.replace("Restarts=0", "Restarts=1")
    run.start(STOP)
    assert run.end == ("stopped", "requeue")
    assert run.asked() == []


@pytest.mark.parametrize("code", [143, 137, 1])
def test_ranks_that_preemption_killed_have_not_failed(run: Run, code: int) -> None:
    run.slurm.job = ENDING.replace("Restarts=0", "Restarts=3")
    run.start(exits(code), SLURM_RESTART_COUNT="2")
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize(
    "job",
    [
        ENDING + " PreemptTime=2026-01-01T00:00:00",
        RUNNING.replace("RUNNING", "PREEMPTED"),
        ENDING.replace("Reason=None", "Reason=NodeDown"),
        RUNNING.replace("RUNNING", "NODE_FAIL"),
    ],
)
def test_a_job_that_slurm_ended_without_requeueing_it_is_put_back(run: Run, job: str) -> None:
    run.slurm.job = job
    run.start(exits(143))
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["requeue 41"]


@pytest.mark.parametrize(
    "job", [ENDING, RUNNING.replace("RUNNING", "CANCELLED"), ENDING + " PreemptTime=None"]
)
@pytest.mark.parametrize("step", [STOP, exits(143)], ids=["stopped", "killed"])
def test_a_job_that_was_cancelled_with_scancel_stays_cancelled(run: Run, job: str, step: Step) -> None:
    run.slurm.job = job
    run.start(SAVE + step)
    assert run.end == ("cancelled", "none")
    assert run.asked() == []


@pytest.mark.parametrize(
    ("requeue", "kind", "mode", "expected"),
    [
        (1, "preempt/partition_prio", "REQUEUE", ("cancelled", "none")),
        (1, "preempt/partition_prio", "CANCEL", ("stopped", "requeue")),
        (1, "preempt/qos", "REQUEUE", ("stopped", "requeue")),  # the QOS may say otherwise
        (0, "preempt/partition_prio", "REQUEUE", ("stopped", "resubmit")),  # SLURM cancels those
    ],
)
@pytest.mark.parametrize("step", [STOP, exits(143)], ids=["stopped", "killed"])
def test_a_scancel_during_the_grace_of_a_preemption_is_one(
    run: Run, step: Step, requeue: int, kind: str, mode: str, expected: tuple[str, str]
) -> None:
    run.slurm.job = ENDING.replace("Requeue=1", f"Requeue={requeue}") + " PreemptTime=2026-01-01T00:00:00"
    run.slurm.config = f"PreemptMode             = REQUEUE\nPreemptType             = {kind}\n"
    run.slurm.partition = f"{PARTITION} PreemptMode={mode}\n"
    run.start(step, SLURM_JOB_PARTITION="low")
    assert run.end == expected


def test_a_job_that_slurm_calls_cancelled_was_not_preempted(run: Run) -> None:
    run.slurm.job = RUNNING.replace("RUNNING", "CANCELLED") + " PreemptTime=2026-01-01T00:00:00"
    run.start(STOP)
    assert run.end == ("cancelled", "none")


@pytest.mark.parametrize(
    "times",
    [
        "RunTime=01:00:05 TimeLimit=01:00:00",
        "RunTime=1-00:00:31 TimeLimit=1-00:00:00",
        "RunTime=08:09:08 TimeLimit=08:09:00",
    ],
)
def test_a_job_at_its_time_limit_goes_on(run: Run, times: str) -> None:
    run.slurm.job = ENDING.partition(" RunTime")[0] + " " + times
    assert run.start(STOP) == 75
    assert run.end == ("stopped", "requeue")


def test_a_job_killed_at_its_time_limit_goes_on_if_it_had_saved(run: Run) -> None:
    run.slurm.job = RUNNING.replace("RUNNING", "TIMEOUT")
    assert run.start(SAVE + exits(137)) == 75
    assert run.end == ("stopped", "requeue")


def test_a_job_that_saves_nothing_in_its_time_has_failed(run: Run) -> None:
    run.slurm.job = RUNNING.replace("RUNNING", "TIMEOUT")
    assert run.start(exits(137)) == 137
    assert run.end == ("failed", "none")


def test_a_job_without_time_limit_is_cancelled_not_timed_out(run: Run) -> None:
    run.slurm.job = ENDING.replace("01:00:00", "UNLIMITED")
    run.start(STOP)
    assert run.end == ("cancelled", "none")


def test_a_controller_that_does_not_answer_changes_nothing(run: Run) -> None:
    run.slurm.job = "down"
    run.start(STOP)
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["requeue 41"]


def falls_silent(run: Run) -> None:
    run.slurm.silence = SILENCE


@pytest.mark.parametrize("silent", [1, 25])
def test_a_controller_that_is_away_for_a_while_is_waited_for(run: Run, silent: int) -> None:
    """A host that is cut off can't ask; what SLURM has done meanwhile must not be taken for a failure."""
    run.slurm.job = GIVEN_UP

    def comes_back() -> None:
        run.slurm.silence = SILENCE if len(run.slept) < silent else ""

    run.on_sleep = comes_back
    run.start(do(falls_silent) + exits(1))
    assert run.end == ("stopped", "requeue")
    assert run.asked() == []


def test_a_controller_that_stays_away_is_waited_for_a_quarter_of_an_hour(run: Run) -> None:
    run.slurm.refusal = "sbatch: error: no"
    run.start(SAVE + do(falls_silent) + exits(1))
    assert run.end == ("failed", "none")
    assert 900 < sum(run.slept) < 3000


def test_a_job_that_could_not_be_put_back_goes_on_when_slurm_starts_it_all_the_same(tmp_path: Path) -> None:
    run = Run(tmp_path, max_restarts=2)
    run.slurm.on["requeue"] = refused
    run.slurm.refusal = "sbatch: error: no"
    run.start(SAVE + exits(1))
    assert run.end == ("failed", "none")
    run.start(saves(10) + exits(1), SLURM_RESTART_COUNT="1")
    assert [event["attempt"] for event in run.events("started")] == [0, 1]
    assert [then for _, then in run.ends] == ["requeue", "none"] * 2, "each counted once"


def is_killed_at(run: Run, seconds: float) -> Callable[[], None]:
    def look() -> None:
        if run.slept[-1] == seconds:
            raise Killed

    return look


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


# --- Whether it would only be stopped again ---


def test_two_attempts_that_are_stopped_at_the_same_step_are_enough(run: Run) -> None:
    run.slurm.job = PREEMPTED
    assert [run.start(TRAIN + exits(143)) for _ in range(2)] == [143, 79]
    assert run.ends == [("stopped", "requeue"), ("no_progress", "none")]
    assert "Two attempts were stopped at step 0" in run.log(1)
    assert f"slurmddp resume {run.folder.name}" in run.log(1)


def test_an_attempt_that_got_further_begins_the_count_again(run: Run) -> None:
    run.slurm.job = PREEMPTED
    for step in (TRAIN, TRAIN + SAVE, TRAIN):
        run.start(step + exits(143))
    assert run.ends == [("stopped", "requeue")] * 3
    assert [event.get("stalled_at") for event in run.events("ended")] == ["", None, "step-9"]
    run.start(TRAIN + exits(143))
    assert run.end == ("no_progress", "none")


def test_preemptions_while_the_training_starts_never_end_a_run(run: Run) -> None:
    run.slurm.job = PREEMPTED
    for step in (TRAIN + exits(143), STOP, STOP, STOP):
        run.start(step)
    assert run.ends == [("stopped", "requeue")] * 4
    run.start(TRAIN + exits(143))
    assert run.end == ("no_progress", "none")


def test_a_time_limit_that_ends_twice_before_the_first_step_ends_the_run(run: Run) -> None:
    run.start(STOP)
    run.start(STOP)
    assert run.ends == [("stopped", "requeue"), ("no_progress", "none")]


IN_GRACE = RUNNING + " PreemptTime=2026-01-01T00:00:00"


@pytest.mark.parametrize("found", [0, 4], ids=["first step", "resume"])
def test_preemptions_whose_grace_outlasts_the_stop_never_end_a_run(run: Run, found: int) -> None:
    """SLURM calls the job running until the grace is over, and the agents leave before."""
    run.slurm.job = IN_GRACE
    if found:
        run.folder.checkpoints_dir.mkdir()
        (run.folder.checkpoints_dir / "latest").write_text(f"step-{found}\n")
    assert [run.start(STOP) for _ in range(3)] == [75] * 3
    assert run.ends == [("stopped", "requeue")] * 3


def test_a_rank_that_a_preemption_broke_in_its_grace_has_not_failed(run: Run) -> None:
    run.slurm.job = IN_GRACE
    run.start(exits(1))
    assert run.end == ("stopped", "requeue")


def test_a_person_who_submits_again_gives_a_stalled_run_another_chance(run: Run) -> None:
    run.start(TRAIN + STOP)
    run.folder.add_event("submitted", job_id="41", submitter="sbatch")
    run.start(TRAIN + STOP)
    assert run.end == ("stopped", "requeue")


def test_stops_by_a_person_are_stops(run: Run) -> None:
    run.start(TRAIN + STOP)
    run.start(STOP_ASKED + TRAIN + STOP)
    assert run.end == ("stopped", "none")


# --- A program that saves nothing that slurmddp sees ---


def of_a_script(tmp_path: Path, **keys: object) -> Run:
    policy = {key: keys.pop(key) for key in list(keys) if key.startswith("max_")}
    config = {"program": {"_target_": OWN_TRAINER, "script": "mine.py", **keys}}
    return Run(tmp_path, program=Program(target=OWN_TRAINER, config=config), **policy)


AT_LIMIT = ENDING.partition(" RunTime")[0] + " RunTime=01:00:05 TimeLimit=01:00:00"


@pytest.mark.parametrize("job", [RUNNING, AT_LIMIT], ids=["signalled", "at the limit"])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_time_limits_without_progress_are_bounded(tmp_path: Path, most: int, job: str) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=most)
    run.slurm.job = job
    assert [run.start(STOP) for _ in range(most + 1)] == [75] * most + [79]
    assert run.ends == [("stopped", "requeue")] * most + [("no_progress", "none")]
    assert [event["without_progress"] for event in run.events("ended")] == list(range(1, most + 2))
    assert f"slurmddp resume {run.folder.name} program.checkpoints=PATH" in run.log(most)
    assert "policy.max_requeues_without_progress" in run.log(most)


@pytest.mark.parametrize("step", [STOP, TRAIN + STOP], ids=["no events", "first_step"])
def test_preemptions_of_a_script_are_not_counted_and_do_not_reset(tmp_path: Path, step: Step) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=1)
    run.start(STOP)
    run.slurm.job = PREEMPTED
    assert [run.start(step) for _ in range(3)] == [75] * 3
    assert [event["without_progress"] for event in run.events("ended")] == [1] * 4
    run.slurm.job = RUNNING
    assert run.start(STOP) == 79


def test_a_checkpoint_in_the_run_folder_begins_the_count_again(tmp_path: Path) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=1)
    for step in (STOP, SAVE + STOP, STOP):
        run.start(step)
    assert [event.get("without_progress") for event in run.events("ended")] == [1, None, 1]
    assert run.start(STOP) == 79


def test_a_person_who_submits_again_gives_a_script_its_time_limits_back(tmp_path: Path) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=0)
    assert run.start(STOP) == 79
    run.folder.add_event("submitted", job_id="41", submitter="sbatch")
    assert run.start(STOP) == 79
    assert [event["without_progress"] for event in run.events("ended")] == [1, 1]


def test_a_script_that_a_person_stops_is_not_called_stuck(tmp_path: Path) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=0)
    run.start(STOP_ASKED + STOP)
    assert run.end == ("stopped", "none")


@pytest.mark.parametrize(
    ("pattern", "saved"),
    [
        ("out", "out/deep/model.pt"),
        ("out/*.pt", "out/b c.pt"),
        ("model.pt", "model.pt"),
        ("{run_dir}/mine/*", "{run_dir}/mine/x"),
        ("it's $(touch hacked)*", "it's $(touch hacked).pt"),
        ("linked", "real/model.pt"),
    ],
)
def test_files_that_a_script_names_are_progress(tmp_path: Path, pattern: str, saved: str) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=0, checkpoints=pattern)
    file = run.project / saved.replace("{run_dir}", str(run.folder.path))
    (run.project / "real").mkdir()
    (run.project / "linked").symlink_to("real")
    (run.project / "real/loop").symlink_to("../real")

    def write(run: Run) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.write(f"{run.attempt}\n")

    assert [run.start(do(write) + STOP) for _ in range(2)] == [75, 75]
    assert "without_progress" not in run.events("ended")[-1]
    run.start(do(write) + exits(1))
    assert run.end == ("failed", "requeue"), "a failure after such progress is tried again"
    assert [(run.start(exits(1)), run.end) for _ in range(2)] == [
        (1, ("failed", "requeue")),
        (1, ("failed", "none")),
    ]
    assert run.start(do(lambda run: (run.project / "other.pt").touch()) + STOP) == 79
    assert not list(tmp_path.rglob("hacked"))


@pytest.mark.parametrize(
    "program",
    [
        Program(target="mine.train", config={}),
        Program(target=OWN_TRAINER, config={"program": {"_target_": OWN_TRAINER, "script": "mine.py"}}),
    ],
    ids=["function", "script"],
)
def test_a_program_of_ones_own_that_tells_nothing_is_not_judged(tmp_path: Path, program: Program) -> None:
    run = Run(tmp_path, program=program)
    for _ in range(3):
        run.start(STOP)
    assert run.ends == [("stopped", "requeue")] * 3


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
