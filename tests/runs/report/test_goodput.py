"""The shares of a run's time, from the events of its attempts."""

from __future__ import annotations

import pytest

from slurmddp.runs.report.goodput import in_order, measure
from slurmddp.runs.status.metrics import LoggedStep
from support.runs.run_events import FAILED, ended, event, saved, started, submitted


def first_step(time, attempt=0, step=1):
    return event("first_step", time, attempt, step=step)


def resumed(time, step, attempt=1):
    return event("resumed", time, attempt, step=step)


def parts_of(events, now=1e6, **more):
    return measure(events, now=now, **more).parts


FINISHED = [
    submitted(100), started(110), first_step(130), saved(150, 10), saved(172, 20), ended(175, "finished"),
]  # fmt: skip
BEGUN = [submitted(0), started(10), first_step(20)]
SAVED = [*BEGUN, saved(42, 10)]
GOES_ON = {"running": True}
BESIDE = [*FINISHED[:4], {**saved(160, 12), "written_s": 6.0}, *FINISHED[4:]]
STOPPED = [*FINISHED[:4], event("signalled", 160, 0), saved(162, 15), ended(163, "stopped")]
RESUBMITTED = [*FAILED[:-1], ended(161, "failed", next_="resubmit"), submitted(163, "8", resubmitted=True)]


@pytest.mark.parametrize(
    ("events", "more", "parts"),
    [
        pytest.param(
            BESIDE, {}, {"training": 36, "saving": 6, "starting": 20, "ending": 3, "queued": 10},
            id="what is written beside the training does not stop it",
        ),
        pytest.param(
            [record for record in FINISHED if record["event"] != "saved"], {},
            {"training": 45, "starting": 20, "queued": 10},
            id="all steps of a finished run count, without a save too",
        ),
        pytest.param(
            [started(0), {**first_step(10), "loads": False}, ended(40, "failed"), started(50, 1),
             {**first_step(60, 1), "loads": False}, ended(90, "finished", attempt=1)],
            {}, {"starting": 20, "unknown": 30, "idle": 10, "training": 30},
            id="a program that does not load may have kept the steps of a failed attempt",
        ),
        pytest.param(
            FAILED, {},
            {"training": 20, "saving": 2, "lost": 18, "starting": 10, "ending": 1, "queued": 10},
            id="steps after the last save of a failed attempt are lost",
        ),
        pytest.param(
            [started(0), first_step(10), saved(52, 1), ended(60, "stopped"), started(60, 1), resumed(61, 1),
             first_step(62, 1, 2)],
            {"now": 62, **GOES_ON}, {"training": 40, "saving": 2, "lost": 8, "starting": 12},
            id="a save that counts epochs keeps the steps before it",
        ),
        pytest.param(
            [started(0), first_step(10), started(100, 1), resumed(101, 41), first_step(102, 1, 42)],
            {"now": 102, "logged": {0: LoggedStep(81, 90.0)}, **GOES_ON},
            {"starting": 12, "training": 40, "lost": 40, "queued": 10},
            id="steps that no save marks are placed in proportion: no `saved` was written before the death",
        ),
        pytest.param(
            [*SAVED, submitted(100, "8"), started(130, 1, "8")], {"now": 130},
            {"queued": 40, "starting": 10, "training": 20, "saving": 2, "idle": 58},
            id="a new submission ends the idle time of a lost run",
        ),
        pytest.param(
            [*BEGUN, submitted(100, "8")], {"now": 130, "pending": True, **GOES_ON},
            {"queued": 40, "starting": 10, "idle": 80},
            id="an attempt before the job that runs does not run",
        ),
        pytest.param(
            [*BEGUN, submitted(30, "8"), started(60, 1, "8")],
            {"now": 60, "logged": {0: LoggedStep(9, 50.0)}}, {"queued": 20, "starting": 10, "lost": 30},
            id="a line logged after a new submission makes nothing negative",
        ),
        pytest.param(
            [started(0), first_step(10), saved(30, 9, seconds=500), saved(40, 12, seconds=99)],
            {"now": 50, **GOES_ON}, {"training": 10, "saving": 30, "starting": 10},
            id="a save is no longer than the time since the save before",
        ),
        pytest.param(
            [started(0, launcher="local"), first_step(5), saved(10, 3), started(100, 1, "local-2", "local")],
            {"now": 100}, {"starting": 5, "training": 3, "saving": 2, "idle": 90},
            id="a local run without an end was not in a queue",
        ),
        pytest.param(
            [submitted(0), event("cancelled", 10, job_id="7"), submitted(100, "8"), started(105, 0, "8")],
            {"now": 105}, {"queued": 15, "idle": 90},
            id="a cancelled run is idle until it is submitted again",
        ),
        pytest.param(
            [submitted(0), started(5), event("cancelled", 25, job_id="7"), submitted(60, "8"),
             started(65, 1, "8")],
            {"now": 65, "records_steps": False}, {"queued": 10, "idle": 35, "unknown": 20},
            id="an attempt that SLURM killed after a cancel ran until the cancel",
        ),
        pytest.param(
            [started(10), submitted(12), *FINISHED[2:]], {},
            {"starting": 120, "training": 38, "saving": 4, "ending": 3},
            id="a job may be faster than its submitter",
        ),
        pytest.param(
            [*RESUBMITTED, started(170, 1, "8")], {"now": 170},
            {"training": 20, "saving": 2, "lost": 18, "starting": 10, "ending": 1, "queued": 10 + 9},
            id="a resubmission waits in the queue",
        ),
        pytest.param(SAVED[:2], {"now": 50, **GOES_ON}, {"queued": 10, "starting": 40}, id="starting"),
        pytest.param(SAVED[:1], {"now": 50, "pending": True, **GOES_ON}, {"queued": 50}, id="queued"),
        pytest.param(SAVED[:1], {"now": 50}, {}, id="queued, as far as anybody knows"),
    ],
)  # fmt: skip
def test_each_second_has_its_kind(events, more, parts):
    assert parts_of(events, **more) == parts


def test_an_undisturbed_run():
    goodput = measure(FINISHED, now=1e6)
    assert goodput.parts == {"training": 38, "saving": 4, "starting": 20, "ending": 3, "queued": 10}
    assert goodput.whole == 75
    assert goodput.share == pytest.approx(38 / 75)
    assert goodput.share_on_nodes == pytest.approx(38 / 65)
    (entry,) = goodput.attempts
    assert (entry.attempt, entry.whole) == (0, 75)


def test_a_state_that_is_written_after_a_failure_counts_to_its_copy():
    killed = [*FINISHED[:3], event("rank_failed", 141, 0), {**saved(146, 10), "written_s": 6.0}]
    killed += [ended(147, "failed", next_="resubmit"), started(150, 1), resumed(151, 10)]
    parts = parts_of(killed, now=151)
    assert (parts["training"], parts["saving"], parts.get("lost", 0)) == (8, 2, 1), "the copy ends at 140"


def test_a_later_attempt_that_resumes_from_an_older_checkpoint_takes_steps_back():
    """The newest checkpoint was damaged and put aside, so its steps are lost."""
    events = [started(0), first_step(10), saved(32, 10), saved(54, 20), event("signalled", 60, 0)]
    events += [saved(62, 23), ended(63, "stopped", next_="requeue")]
    assert parts_of(events)["training"] == 46
    again = [*events, started(70, 1), resumed(71, 10), first_step(72, 1, 11)]
    assert parts_of(again, now=72, **GOES_ON)["lost"] == 26
    assert parts_of([*events, started(70, 1), first_step(72, 1)], now=72, **GOES_ON)["lost"] == 46


@pytest.mark.parametrize("logged", [{}, {0: LoggedStep(30, 40.0)}])
def test_what_lies_beyond_all_that_is_known_is_not_called_lost(logged):
    events = [started(0), first_step(10), event("rank_failed", 50, 0), ended(50, "failed", next_="requeue")]
    assert "lost" not in parts_of(
        [*events, started(60, 1), resumed(61, 31)], now=61, logged=logged, **GOES_ON
    )


def test_an_attempt_without_an_end_ends_at_its_last_sign_of_life():
    events = [*SAVED, started(400, 1), resumed(410, 10)]
    parts = measure(events, now=410, logged={0: LoggedStep(15, 52.0)}, **GOES_ON).attempts[0].parts
    assert parts == {"queued": 10, "starting": 10, "training": 20, "saving": 2, "lost": 10}
    assert parts_of(events, now=410, **GOES_ON)["queued"] == 10 + 400 - 42, "its save ends it"


def test_a_run_that_continues_is_counted_until_now():
    assert parts_of(SAVED, now=50, **GOES_ON)["training"] == 28
    assert parts_of(FAILED, now=200, pending=True)["queued"] == 10 + 39
    assert parts_of(FAILED, now=200)["queued"] == 10, "the job may still wait"


def test_nobody_asked_for_more():
    assert "idle" not in parts_of(STOPPED)
    parts = parts_of([*STOPPED, submitted(1000, "8"), started(1010, 1, "8")], now=1010)
    assert (parts["idle"], parts["queued"]) == (1000 - 163, 20)


def test_ranks_that_began_anew_in_place():
    """In an attempt rank 1 dies, and all ranks restart in the same allocation."""
    events = [started(0), first_step(10), saved(32, 20), event("rank_failed", 40, 0, rank=1)]
    events += [resumed(43, 20, 0), first_step(45, step=21), saved(67, 40), ended(68, "finished")]
    (entry,) = measure(events, now=1e6).attempts
    assert entry.parts == {"starting": 15, "training": 40, "saving": 4, "lost": 8, "ending": 1}
    unsaved = [*events[:2], events[3], {**events[4], "step": 11}, {**events[5], "step": 12}, *events[6:]]
    signs = {0: LoggedStep(step=40, time=65.0)}
    assert "lost" not in parts_of(unsaved, logged=signs), "the ranks after the restart logged the line"


@pytest.mark.parametrize(
    ("rest", "parts"),
    [
        pytest.param(
            [saved(72, 40), saved(92, 60), ended(93, "finished")],
            {"starting": 10, "training": 20 + 20 + 18, "saving": 6, "lost": 18, "ending": 1}, id="finished",
        ),
        pytest.param(
            [saved(72, 40), event("rank_failed", 80, 0), ended(80, "failed")],
            {"starting": 10, "training": 20 + 20, "saving": 4, "lost": 18 + 8}, id="failed afterwards",
        ),
        pytest.param(
            [event("rank_failed", 60, 0), resumed(65, 20, 0), first_step(67, step=21), saved(87, 40),
             ended(87, "finished")],
            {"starting": 10 + 7, "training": 20 + 18, "saving": 4, "lost": 18 + 10},
            id="restarted in place afterwards",
        ),
        pytest.param(
            [resumed(60, 20, 0), saved(82, 40), ended(82, "finished")],
            {"starting": 10, "training": 20 + 20, "saving": 4, "lost": 18 + 10}, id="rolled back twice",
        ),
    ],
)  # fmt: skip
def test_after_a_rollback_the_same_ranks_train_on(rest, parts):
    """The ranks save step 20 at 32, and load it again at 50, after a spike of the loss."""
    rolled_back = [started(0), first_step(10), saved(32, 20), resumed(50, 20, 0)]
    assert parts_of([*rolled_back, *rest]) == parts


def test_a_program_that_records_no_steps_has_no_goodput():
    goodput = measure([submitted(0), started(10), ended(100, "finished")], now=1e6, records_steps=False)
    assert (goodput.parts, goodput.share) == ({"queued": 10, "unknown": 90}, None)
    assert goodput.share_on_nodes is None
    assert measure([], now=1.0).share is None
    assert measure([submitted(0)], now=1.0, pending=True).share_on_nodes is None


@pytest.mark.parametrize("wrong", [5.0, 1e12], ids=["back", "ahead"])
def test_a_clock_that_is_wrong_for_a_moment_spoils_nothing_else(wrong):
    parts = parts_of([*FINISHED[:3], {**FINISHED[3], "time": wrong}, *FINISHED[4:]])
    assert (parts["queued"], parts["starting"], parts["ending"], sum(parts.values())) == (10, 20, 3, 75)


def test_times_in_order_keep_as_many_as_they_can():
    assert in_order([3.0, 99.0, 4.0, None, 5.0, 1.0]) == [3.0, 3.0, 4.0, 4.0, 5.0, 5.0]
    assert in_order([None, 7.0, 2.0, 3.0]) == [2.0, 2.0, 2.0, 3.0]
    assert in_order([None]) == [0.0]
