"""Where the time of a run went: every second has one word, whatever the record looks like."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.runs.folder import RunFolder, append_line
from slurmddp.runs.ledger import WORDS, account, in_order, read_ledger
from slurmddp.runs.phases import newest_phases
from slurmddp.runs.status import RunStatus
from slurmddp.runs.track import Sign, moment_of, whole_number


def event(kind, time, attempt=None, **facts):
    number = {} if attempt is None else {"attempt": attempt}
    return {"event": kind, "time": time, **number, **facts}


def submitted(time, job_id="7", **facts):
    return event("submitted", time, job_id=job_id, **facts)


def started(time, attempt=0, job_id="7", launcher="slurm", **facts):
    return event("started", time, attempt, job_id=job_id, launcher=launcher, **facts)


def ended(time, outcome, attempt=0, next_="none", job_id="7"):
    return event("ended", time, attempt, job_id=job_id, outcome=outcome, next=next_)


def saved(time, step, attempt=0, seconds=2.0):
    return event("saved", time, attempt, step=step, seconds=seconds)


def parts_of(events, now=1e6, **more):
    return account(events, now=now, **more).parts


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
    found = account(beside, now=1e6)
    assert found.parts == {"training": 36, "saving": 6, "starting": 20, "ending": 3, "queued": 10}
    killed = [*FINISHED[:3], event("rank_failed", 141, 0), {**saved(146, 10), "written_s": 6.0}]
    killed += [ended(147, "failed", next_="resubmit"), started(150, 1), event("resumed", 151, 1, step=10)]
    parts = account(killed, now=151).parts
    assert (parts["training"], parts["saving"], parts.get("lost", 0)) == (8, 2, 1), "the copy was done at 140"


def test_an_undisturbed_run():
    found = account(FINISHED, now=1e6)
    assert found.parts == {"training": 38, "saving": 4, "starting": 20, "ending": 3, "queued": 10}
    assert found.whole == 75
    assert found.goodput == pytest.approx(38 / 75)
    assert found.share_on_nodes == pytest.approx(38 / 65)
    (entry,) = found.entries
    assert (entry.attempt, entry.whole) == (0, 75)


def test_all_steps_of_a_finished_run_count_without_a_save_too():
    events = [one for one in FINISHED if one["event"] != "saved"]
    assert parts_of(events) == {"training": 45, "starting": 20, "queued": 10}


FAILED = [
    submitted(100),
    started(110),
    event("first_step", 120, 0, step=1),
    saved(142, 20),
    event("rank_failed", 160, 0, rank=1),
    ended(161, "failed", next_="requeue"),
]


def test_steps_after_the_last_save_of_a_failed_attempt_are_lost():
    assert parts_of(FAILED) == {
        "training": 20, "saving": 2, "lost": 18, "starting": 10, "ending": 1, "queued": 10,
    }  # fmt: skip


def test_steps_made_once_more_count_once():
    again = [
        started(170, 1),
        event("resumed", 175, 1, step=20),
        event("first_step", 180, 1, step=21),
        saved(222, 60, 1),
        ended(223, "finished", 1),
    ]
    found = account([*FAILED, *again], now=1e6)
    assert [one.attempt for one in found.entries] == [0, 1]
    assert found.entries[1].parts == {
        "queued": 9, "starting": 10, "training": 40, "saving": 2, "ending": 1,
    }  # fmt: skip
    assert found.parts["training"] == 60
    assert found.parts["lost"] == 18


def test_a_later_attempt_that_goes_on_from_an_older_checkpoint_takes_steps_back():
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
    assert parts_of([*events, *resumed], now=72, runs=True)["lost"] == 26
    fresh = [started(70, 1), event("first_step", 72, 1, step=1)]
    assert parts_of([*events, *fresh], now=72, runs=True)["lost"] == 46


def test_steps_that_no_event_of_a_save_marks_are_placed_in_proportion():
    """An attempt died after its checkpoint was whole and before it could write so down."""
    events = [
        started(0),
        event("first_step", 10, 0, step=1),
        started(100, 1),
        event("resumed", 101, 1, step=41),
        event("first_step", 102, 1, step=42),
    ]
    found = account(events, now=102, runs=True, signs={0: Sign(step=81, time=90.0)})
    assert found.entries[0].parts == {"starting": 10, "training": 40, "lost": 40}


@pytest.mark.parametrize(("last", "lost"), [(None, 0.0), (Sign(30, 40.0), 0.0)])
def test_what_lies_beyond_all_that_is_known_is_not_called_lost(last, lost):
    events = [
        started(0),
        event("first_step", 10, 0, step=1),
        event("rank_failed", 50, 0),
        ended(50, "failed", next_="requeue"),
        started(60, 1),
        event("resumed", 61, 1, step=31),
    ]
    found = account(events, now=61, runs=True, signs={0: last} if last else {})
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
    parts = account(events, now=410, runs=True, signs={0: Sign(15, 52.0)}).entries[0].parts
    assert parts == {"queued": 10, "starting": 10, "training": 20, "saving": 2, "lost": 10}
    assert parts_of(events, now=410, runs=True)["queued"] == 10 + 400 - 42, "no line: the save is the last"


def test_a_person_who_asks_again_ends_the_idle_time_of_a_lost_run():
    events = [submitted(0), started(10), event("first_step", 20, 0, step=1), saved(42, 10)]
    assert parts_of(events)["training"] == 20
    again = [submitted(100, "8"), started(130, 1, "8")]
    assert parts_of([*events, *again], now=130) == {
        "queued": 40, "starting": 10, "training": 20, "saving": 2, "idle": 58,
    }  # fmt: skip


def test_an_attempt_before_the_job_that_runs_is_not_what_runs():
    events = [submitted(0), started(10), event("first_step", 20, 0, step=1), submitted(100, "8")]
    found = parts_of(events, now=130, runs=True, waits=True)
    assert found == {"queued": 40, "starting": 10, "idle": 80}


def test_a_line_logged_after_a_person_asked_again_makes_nothing_negative():
    events = [submitted(0), started(10), event("first_step", 20, 0, step=1), submitted(30, "8")]
    found = account([*events, started(60, 1, "8")], now=60, signs={0: Sign(9, 50.0)})
    assert found.parts == {"queued": 20, "starting": 10, "lost": 30}


def test_a_save_is_no_longer_than_what_lies_between_it_and_the_one_before():
    events = [
        started(0),
        event("first_step", 10, 0, step=1),
        saved(30, 9, seconds=500),
        saved(40, 12, seconds=99),
    ]
    assert parts_of(events, now=50, runs=True) == {"training": 10, "saving": 30, "starting": 10}


def test_a_local_run_without_an_end_was_not_in_a_queue():
    events = [started(0, launcher="local"), event("first_step", 5, 0, step=1), saved(10, 3)]
    found = parts_of([*events, started(100, 1, "local-2", "local")], now=100)
    assert (found["idle"], "queued" in found) == (90, False)


def test_a_run_that_goes_on_is_counted_until_now():
    events = [submitted(0), started(10), event("first_step", 20, 0, step=1), saved(42, 10)]
    assert parts_of(events, now=50, runs=True)["training"] == 28
    assert parts_of(events[:2], now=50, runs=True) == {"queued": 10, "starting": 40}
    assert parts_of(events[:1], now=50, runs=True, waits=True) == {"queued": 50}
    assert parts_of(events[:1], now=50) == {}
    assert parts_of([*FAILED], now=200, waits=True)["queued"] == 10 + 39
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
    (entry,) = account(events, now=1e6).entries
    assert entry.parts == {"starting": 15, "training": 40, "saving": 4, "lost": 8, "ending": 1}
    unsaved = [*events[:2], events[3], {**events[4], "step": 11}, {**events[5], "step": 12}, *events[6:]]
    signs = {0: Sign(step=40, time=65.0)}
    assert "lost" not in account(unsaved, now=1e6, signs=signs).parts, "the line is of the later ranks"


def test_a_program_that_tells_nothing_has_no_goodput():
    found = account([submitted(0), started(10), ended(100, "finished")], now=1e6, tells=False)
    assert (found.parts, found.goodput) == ({"queued": 10, "untold": 90}, None)
    assert found.share_on_nodes is None
    assert account([], now=1.0).goodput is None
    assert account([submitted(0)], now=1.0, waits=True).share_on_nodes is None


def test_elements_of_an_array_count_side_by_side():
    events = [
        submitted(0),
        started(10, 0, "7_0"),
        started(12, 1, "7_1"),
        event("first_step", 20, 0, step=1),
        event("first_step", 22, 1, step=1),
        saved(42, 10, 0),
        ended(43, "finished", 0, job_id="7_0"),
        saved(44, 10, 1),
        ended(45, "finished", 1, job_id="7_1"),
    ]
    found = account(events, now=1e6)
    assert found.whole == 43 + 45
    assert [one.parts["training"] for one in found.entries] == [20, 20]
    assert "lost" not in found.parts
    events[6]["next"] = "resubmit"
    again = account([*events, submitted(50, "9_0", resubmitted=True), started(60, 2, "9_0")], now=60)
    assert again.parts["queued"] == 10 + 12 + (60 - 43)
    one = account([*events, submitted(50, "9_0"), started(60, 2, "9_0")], now=60)
    assert "idle" not in one.parts, "a person went on with the other element"
    queued = [submitted(0), *events[1:3], *(ended(20, "failed", n, "requeue", f"7_{n}") for n in (0, 1))]
    cancelled = account([*queued, event("cancelled", 25, job_id="7_1")], now=1e6)
    assert cancelled.entries[-1].parts == {"queued": 5.0}
    assert cancelled.entries[-2].parts == {"queued": 5.0}


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


KINDS = [
    "submitted", "started", "first_step", "resumed", "saved", "signalled", "rank_failed", "ended",
    "cancelled", "warned", None,
]  # fmt: skip
NUMBERS = st.one_of(
    st.floats(), st.floats(0, 1000), st.floats(0, 1000), st.integers(0, 1000), st.none(), st.text(max_size=2)
)
ATTEMPTS = st.one_of(st.integers(0, 3), st.integers(0, 3), st.sampled_from([None, True, "1", -1, 1.5]))
EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(KINDS)},
    optional={
        "time": NUMBERS,
        "attempt": ATTEMPTS,
        "step": st.one_of(st.integers(-1, 50), st.none(), st.floats()),
        "seconds": NUMBERS,
        "job_id": st.sampled_from(["1", "2", "3", None, 4]),
        "launcher": st.sampled_from(["slurm", "local", None, 1]),
        "outcome": st.sampled_from(["finished", "stopped", "failed", None]),
        "next": st.sampled_from(["none", "requeue", "resubmit", None]),
        "phases": st.one_of(st.dictionaries(st.text(max_size=2), NUMBERS, max_size=3), NUMBERS),
    },
)
LIKELY = st.builds(
    lambda event, step, seconds, **more: {"event": event, "step": step, "seconds": seconds, **more},
    st.sampled_from([kind for kind in KINDS if kind] + ["saved", "started"]),
    st.integers(0, 50),
    st.integers(0, 100),
    attempt=st.integers(0, 2),
    job_id=st.sampled_from("123"),
    next=st.sampled_from(["none", "requeue"]),
    outcome=st.sampled_from(["finished", "failed"]),
)


@st.composite
def likely_records(draw):
    """Events as they are meant to be, mostly: attempt after attempt, and clocks that go on."""
    time, events = 0, sorted(draw(st.lists(LIKELY, max_size=20)), key=lambda one: one["attempt"])
    for one in events:
        time += draw(st.integers(0, 50))
        one["time"] = time
        if one["event"] in ("submitted", "cancelled"):
            del one["attempt"]
    return events


SIGNS = st.dictionaries(st.integers(0, 3), st.builds(Sign, st.integers(0, 50), st.floats(0, 1000)))


@given(
    st.one_of(
        st.lists(st.one_of(EVENTS, EVENTS, EVENTS, st.none(), st.text(max_size=3)), max_size=25),
        likely_records(),
    ),
    st.floats(0, 1000),
    st.booleans(),
    SIGNS,
)
def test_whatever_was_written_all_of_the_time_is_told_and_none_twice(events, now, tells, signs):
    known = [one for one in events if isinstance(one, dict)]
    times = in_order([moment_of(one.get("time")) for one in known])
    end = max([now, *times[-1:]])
    begun = [
        time
        for one, time in zip(known, times, strict=True)
        if one["event"] == "submitted"
        or (one["event"] != "cancelled" and whole_number(one.get("attempt")) is not None)
    ]
    for goes_on in (True, False):
        found = account(events, now=now, runs=goes_on, waits=goes_on, tells=tells, signs=signs)
        assert set(found.parts) <= set(WORDS)
        assert all(seconds >= 0 for one in found.entries for seconds in one.parts.values())
        whole = end - begun[0] if begun else 0.0
        if goes_on:
            assert math.isclose(found.whole, whole, rel_tol=1e-9, abs_tol=1e-6)
        else:
            assert found.whole <= whole + 1e-6
        assert found.goodput is None or 0 <= found.goodput <= 1 + 1e-9
    phases = newest_phases(events)
    assert phases is None or all(seconds >= 0 for seconds in phases.seconds.values())
    both = account([*events, *events], now=now, runs=True, waits=True, tells=tells, signs=signs)
    assert all(seconds >= 0 for one in both.entries for seconds in one.parts.values())


WHOLE_SECONDS = st.integers(1, 500).map(float)
LIVES = st.fixed_dictionaries(
    {
        "queued": WHOLE_SECONDS,
        "starting": WHOLE_SECONDS,
        "rounds": st.lists(st.tuples(st.integers(1, 50), WHOLE_SECONDS), max_size=4),
        "tail": st.tuples(st.integers(1, 50), st.just(1.0)),
        "ending": WHOLE_SECONDS,
        "how": st.sampled_from(["stopped", "failed", "vanished"]),
    }
)


@given(st.lists(LIVES, min_size=1, max_size=5))
def test_a_run_that_was_made_up_is_taken_apart_again(lives):
    """A step takes a second. An attempt that fails or vanishes loses the steps of its tail."""
    true = dict.fromkeys(WORDS, 0.0)
    events, signs = [submitted(0.0)], {}
    time, step = 0.0, 0
    for attempt, life in enumerate(lives):
        time += life["queued"]
        true["queued"] += life["queued"]
        events.append(started(time, attempt))
        events += [event("resumed", time, attempt, step=step)] if step else []
        time += life["starting"]
        true["starting"] += life["starting"]
        made = step + 1
        events.append(event("first_step", time, attempt, step=made))
        for steps, seconds in life["rounds"]:
            made, time = made + steps, time + steps + seconds
            step = made
            true["training"] += steps
            true["saving"] += seconds
            events.append(saved(time, step, attempt, seconds))
        steps, seconds = life["tail"]
        time += steps
        signs[attempt] = Sign(made + steps, time)
        if life["how"] == "stopped":
            events.append(event("signalled", time, attempt))
            time, step = time + seconds, made + steps
            events.append(saved(time, step, attempt, seconds))
            true["training"] += steps
            true["saving"] += seconds
        else:
            true["lost"] += steps
        if life["how"] == "failed":
            events.append(event("rank_failed", time, attempt))
        if life["how"] == "vanished":
            true["queued"] += life["ending"]  # Until SLURM noticed.
        else:
            true["ending"] += life["ending"]
        time += life["ending"]
        if life["how"] != "vanished":
            events.append(ended(time, life["how"], attempt, next_="requeue"))
    found = account(events, now=time, waits=True, signs=signs)
    assert found.whole == time
    assert found.parts == pytest.approx({word: seconds for word, seconds in true.items() if seconds})


RUNNING = RunStatus(name="gpt", path=Path(), state="running", detail="", active=True)


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "gpt-0a1b2c3d")
    run.path.mkdir()
    run.config_file.write_text("name: gpt\ntrain: {steps: 40}\n")
    return run


def test_lines_of_metrics_are_looked_at_for_an_attempt_without_an_end(folder):
    for one in (started(0), event("first_step", 10, 0, step=1), saved(32, 20), started(100, 1)):
        append_line(folder.attempts_file, one)
    append_line(folder.metrics_file, {"step": 25, "attempt": 0, "time": 37.0, "loss": 1.0})
    found = read_ledger(folder, RUNNING, 110.0)
    assert found.parts == {"training": 20, "saving": 2, "lost": 5, "starting": 20, "queued": 63}


@pytest.mark.parametrize(("host", "training"), [("another-host", 20), (None, 88)])
def test_a_local_run_that_is_not_seen_is_not_believed_to_train(folder, monkeypatch, host, training):
    monkeypatch.setattr(
        "slurmddp.runs.ledger.is_alive", lambda pid, host, started: host != "another-host" or None
    )
    events = [
        started(0, launcher="local", job_id="local-1", pid=1, host=host or socket.gethostname()),
        event("first_step", 10, 0, step=1),
        saved(32, 20),
    ]
    for one in events:
        append_line(folder.attempts_file, one)
    assert read_ledger(folder, RUNNING, 100.0).parts["training"] == training


@pytest.mark.parametrize(
    ("state", "active", "parts"),
    [
        ("running", True, {"training": 88}),
        ("cancelled", True, {"training": 88}),
        ("stopped", True, {"queued": 68}),
        ("unknown", True, {}),
        ("lost", False, {}),
    ],
)
def test_what_goes_on_is_what_the_status_says(folder, state, active, parts):
    for one in (started(0), event("first_step", 10, 0, step=1), saved(32, 20)):
        append_line(folder.attempts_file, one)
    found = read_ledger(folder, replace(RUNNING, state=state, active=active), 100.0)
    assert found.parts == {"training": 20, "saving": 2, "starting": 10} | parts


@pytest.mark.parametrize(
    "program", ["{_target_: my.train}", "{script: train.py, _target_: slurmddp.training.trainer.train}"]
)
def test_a_program_of_ones_own_is_known_by_the_configuration(folder, program):
    folder.config_file.write_text(f"name: gpt\nprogram: {program}\n")
    append_line(folder.attempts_file, started(0))
    assert read_ledger(folder, RUNNING, 5.0).parts == {"untold": 5}


def test_the_ledger_for_programs_adds_up():
    found = account([*FAILED, started(170, 1)], now=180, runs=True).as_json()
    assert found["whole"] == sum(found["parts"].values()) == 80
    assert found["goodput"] == 0.25
    assert found["attempts"][1] == {"attempt": 1, "parts": {"queued": 9.0, "starting": 10.0}}
