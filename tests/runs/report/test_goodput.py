"""The shares of a run's time, from the events of its attempts."""

from __future__ import annotations

import pytest

from slurmddp.runs.report.goodput import in_order, measure
from slurmddp.runs.status.metrics import LoggedStep
from support.runs.run_events import FAILED, ended, event, saved, started, submitted


def parts_of(events, now=1e6, **more):
    return measure(events, now=now, **more).parts


FINISHED = [
    submitted(100),
    started(110),
    event("first_step", 130, 0, step=1),
    saved(150, 10),
    saved(172, 20),
    ended(175, "finished"),
]


def test_what_is_written_beside_the_training_does_not_stop_it():
    beside = [*FINISHED[:4], {**saved(160, 12), "written_s": 6.0}, *FINISHED[4:]]
    found = measure(beside, now=1e6)
    assert found.parts == {"training": 36, "saving": 6, "starting": 20, "ending": 3, "queued": 10}
    killed = [*FINISHED[:3], event("rank_failed", 141, 0), {**saved(146, 10), "written_s": 6.0}]
    killed += [ended(147, "failed", next_="resubmit"), started(150, 1), event("resumed", 151, 1, step=10)]
    parts = measure(killed, now=151).parts
    assert (parts["training"], parts["saving"], parts.get("lost", 0)) == (8, 2, 1), "the copy was done at 140"


def test_an_undisturbed_run():
    found = measure(FINISHED, now=1e6)
    assert found.parts == {"training": 38, "saving": 4, "starting": 20, "ending": 3, "queued": 10}
    assert found.whole == 75
    assert found.share == pytest.approx(38 / 75)
    assert found.share_on_nodes == pytest.approx(38 / 65)
    (entry,) = found.attempts
    assert (entry.attempt, entry.whole) == (0, 75)


def test_all_steps_of_a_finished_run_count_without_a_save_too():
    events = [one for one in FINISHED if one["event"] != "saved"]
    assert parts_of(events) == {"training": 45, "starting": 20, "queued": 10}


def test_steps_after_the_last_save_of_a_failed_attempt_are_lost():
    assert parts_of(FAILED) == {
        "training": 20, "saving": 2, "lost": 18, "starting": 10, "ending": 1, "queued": 10,
    }  # fmt: skip


def test_a_save_that_counts_epochs_keeps_the_steps_before_it():
    first = [started(0), event("first_step", 10, 0, step=1), saved(52, 1), ended(60, "stopped")]
    again = [started(60, 1), event("resumed", 61, 1, step=1), event("first_step", 62, 1, step=2)]
    parts = parts_of([*first, *again], now=62, running=True)
    assert (parts["training"], parts["saving"], parts["lost"]) == (40, 2, 8)


def test_steps_made_once_more_count_once():
    again = [
        started(170, 1),
        event("resumed", 175, 1, step=20),
        event("first_step", 180, 1, step=21),
        saved(222, 60, 1),
        ended(223, "finished", 1),
    ]
    found = measure([*FAILED, *again], now=1e6)
    assert [one.attempt for one in found.attempts] == [0, 1]
    assert found.attempts[1].parts == {
        "queued": 9, "starting": 10, "training": 40, "saving": 2, "ending": 1,
    }  # fmt: skip
    assert found.parts["training"] == 60
    assert found.parts["lost"] == 18


def test_a_later_attempt_that_resumes_from_an_older_checkpoint_takes_steps_back():
    """The newest checkpoint was damaged and set aside: what was kept until then is lost."""
    events = [
        started(0),
        event("first_step", 10, 0, step=1),
        saved(32, 10),
        saved(54, 20),
        event("signalled", 60, 0),
        saved(62, 23),
        ended(63, "stopped", next_="requeue"),
    ]
    assert parts_of(events)["training"] == 46
    resumed = [started(70, 1), event("resumed", 71, 1, step=10), event("first_step", 72, 1, step=11)]
    assert parts_of([*events, *resumed], now=72, running=True)["lost"] == 26
    fresh = [started(70, 1), event("first_step", 72, 1, step=1)]
    assert parts_of([*events, *fresh], now=72, running=True)["lost"] == 46


def test_steps_that_no_event_of_a_save_marks_are_placed_in_proportion():
    """An attempt died after its checkpoint was whole and before it could write so down."""
    events = [
        started(0),
        event("first_step", 10, 0, step=1),
        started(100, 1),
        event("resumed", 101, 1, step=41),
        event("first_step", 102, 1, step=42),
    ]
    found = measure(events, now=102, running=True, logged={0: LoggedStep(step=81, time=90.0)})
    assert found.attempts[0].parts == {"starting": 10, "training": 40, "lost": 40}


@pytest.mark.parametrize(("last", "lost"), [(None, 0.0), (LoggedStep(30, 40.0), 0.0)])
def test_what_lies_beyond_all_that_is_known_is_not_called_lost(last, lost):
    events = [
        started(0),
        event("first_step", 10, 0, step=1),
        event("rank_failed", 50, 0),
        ended(50, "failed", next_="requeue"),
        started(60, 1),
        event("resumed", 61, 1, step=31),
    ]
    found = measure(events, now=61, running=True, logged={0: last} if last else {})
    assert found.parts.get("lost", 0.0) == lost


def test_an_attempt_without_an_end_ends_at_its_last_sign_of_life():
    events = [
        submitted(0),
        started(10),
        event("first_step", 20, 0, step=1),
        saved(42, 10),
        started(400, 1),
        event("resumed", 410, 1, step=10),
    ]
    parts = measure(events, now=410, running=True, logged={0: LoggedStep(15, 52.0)}).attempts[0].parts
    assert parts == {"queued": 10, "starting": 10, "training": 20, "saving": 2, "lost": 10}
    assert parts_of(events, now=410, running=True)["queued"] == 10 + 400 - 42, "no line: the save is the last"


def test_a_new_submission_ends_the_idle_time_of_a_lost_run():
    events = [submitted(0), started(10), event("first_step", 20, 0, step=1), saved(42, 10)]
    assert parts_of(events)["training"] == 20
    again = [submitted(100, "8"), started(130, 1, "8")]
    assert parts_of([*events, *again], now=130) == {
        "queued": 40, "starting": 10, "training": 20, "saving": 2, "idle": 58,
    }  # fmt: skip


def test_an_attempt_before_the_job_that_runs_is_not_what_runs():
    events = [submitted(0), started(10), event("first_step", 20, 0, step=1), submitted(100, "8")]
    found = parts_of(events, now=130, running=True, pending=True)
    assert found == {"queued": 40, "starting": 10, "idle": 80}


def test_a_line_logged_after_a_new_submission_makes_nothing_negative():
    events = [submitted(0), started(10), event("first_step", 20, 0, step=1), submitted(30, "8")]
    found = measure([*events, started(60, 1, "8")], now=60, logged={0: LoggedStep(9, 50.0)})
    assert found.parts == {"queued": 20, "starting": 10, "lost": 30}


def test_a_save_is_no_longer_than_what_lies_between_it_and_the_one_before():
    events = [
        started(0),
        event("first_step", 10, 0, step=1),
        saved(30, 9, seconds=500),
        saved(40, 12, seconds=99),
    ]
    assert parts_of(events, now=50, running=True) == {"training": 10, "saving": 30, "starting": 10}


def test_a_local_run_without_an_end_was_not_in_a_queue():
    events = [started(0, launcher="local"), event("first_step", 5, 0, step=1), saved(10, 3)]
    found = parts_of([*events, started(100, 1, "local-2", "local")], now=100)
    assert (found["idle"], "queued" in found) == (90, False)


def test_a_run_that_continues_is_counted_until_now():
    events = [submitted(0), started(10), event("first_step", 20, 0, step=1), saved(42, 10)]
    assert parts_of(events, now=50, running=True)["training"] == 28
    assert parts_of(events[:2], now=50, running=True) == {"queued": 10, "starting": 40}
    assert parts_of(events[:1], now=50, running=True, pending=True) == {"queued": 50}
    assert parts_of(events[:1], now=50) == {}
    assert parts_of([*FAILED], now=200, pending=True)["queued"] == 10 + 39
    assert parts_of([*FAILED], now=200)["queued"] == 10, "nobody knows whether it still waits"


def test_nobody_asked_for_more():
    stopped = [*FINISHED[:4], event("signalled", 160, 0), saved(162, 15), ended(163, "stopped")]
    assert "idle" not in parts_of(stopped)
    found = parts_of([*stopped, submitted(1000, "8"), started(1010, 1, "8")], now=1010)
    assert (found["idle"], found["queued"]) == (1000 - 163, 20)
    cancelled = [submitted(0), event("cancelled", 10, job_id="7"), submitted(100, "8"), started(105, 0, "8")]
    assert parts_of(cancelled, now=105) == {"queued": 15, "idle": 90}


def test_a_job_that_was_faster_than_its_submitter():
    assert parts_of([started(10), submitted(12), *FINISHED[2:]])["starting"] == 120


def test_a_resubmission_waits_in_the_queue():
    events = [*FAILED[:-1], ended(161, "failed", next_="resubmit"), submitted(163, "8", resubmitted=True)]
    assert parts_of([*events, started(170, 1, "8")], now=170)["queued"] == 10 + 9


def test_ranks_that_began_anew_in_place():
    """One attempt: rank 1 dies, all begin again in the same allocation."""
    events = [
        started(0),
        event("first_step", 10, 0, step=1),
        saved(32, 20),
        event("rank_failed", 40, 0, rank=1),
        event("resumed", 43, 0, step=20),
        event("first_step", 45, 0, step=21),
        saved(67, 40),
        ended(68, "finished"),
    ]
    (entry,) = measure(events, now=1e6).attempts
    assert entry.parts == {"starting": 15, "training": 40, "saving": 4, "lost": 8, "ending": 1}
    unsaved = [*events[:2], events[3], {**events[4], "step": 11}, {**events[5], "step": 12}, *events[6:]]
    signs = {0: LoggedStep(step=40, time=65.0)}
    assert "lost" not in measure(unsaved, now=1e6, logged=signs).parts, "the line is of the later ranks"


def test_a_program_that_records_no_steps_has_no_goodput():
    found = measure([submitted(0), started(10), ended(100, "finished")], now=1e6, records_steps=False)
    assert (found.parts, found.share) == ({"queued": 10, "unknown": 90}, None)
    assert found.share_on_nodes is None
    assert measure([], now=1.0).share is None
    assert measure([submitted(0)], now=1.0, pending=True).share_on_nodes is None


@pytest.mark.parametrize("wrong", [5.0, 1e12], ids=["back", "ahead"])
def test_a_clock_that_is_wrong_for_a_moment_spoils_nothing_else(wrong):
    events = [dict(one) for one in FINISHED]
    events[3]["time"] = wrong
    found = parts_of(events)
    assert found["queued"] == 10
    assert found["starting"] == 20
    assert found["ending"] == 3
    assert sum(found.values()) == 75


def test_times_in_order_keep_as_many_as_they_can():
    assert in_order([3.0, 99.0, 4.0, None, 5.0, 1.0]) == [3.0, 3.0, 4.0, 4.0, 5.0, 5.0]
    assert in_order([None, 7.0, 2.0, 3.0]) == [2.0, 2.0, 2.0, 3.0]
    assert in_order([None]) == [0.0]
