"""Every second of a run has one kind of time, whatever the record looks like."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.runs.report.goodput import KINDS, in_order, measure
from slurmddp.runs.report.start_phases import newest_phases
from slurmddp.runs.report.timeline import whole_number
from slurmddp.runs.status.metrics import LoggedStep, line_times, seconds_or_none
from support.runs.run_events import ended, event, saved, started, submitted

EVENT_NAMES = [
    "submitted", "started", "first_step", "resumed", "saved", "signalled", "rank_failed", "ended",
    "cancelled", "warned", None,
]  # fmt: skip
NUMBERS = st.one_of(
    st.floats(), st.floats(0, 1000), st.floats(0, 1000), st.integers(0, 1000), st.none(), st.text(max_size=2)
)
ATTEMPTS = st.one_of(st.integers(0, 3), st.integers(0, 3), st.sampled_from([None, True, "1", -1, 1.5]))
EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(EVENT_NAMES)},
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
    st.sampled_from([kind for kind in EVENT_NAMES if kind] + ["saved", "started"]),
    st.integers(0, 50),
    st.integers(0, 100),
    attempt=st.integers(0, 2),
    job_id=st.sampled_from("123"),
    next=st.sampled_from(["none", "requeue"]),
    outcome=st.sampled_from(["finished", "failed"]),
)


@st.composite
def likely_records(draw):
    """Return plausible events: attempt after attempt, with clocks that go forward."""
    time = 0
    events = sorted(draw(st.lists(LIKELY, max_size=20)), key=lambda record: record["attempt"])
    for record in events:
        time += draw(st.integers(0, 50))
        record["time"] = time
        if record["event"] in ("submitted", "cancelled"):
            del record["attempt"]
    return events


LOGGED = st.dictionaries(st.integers(0, 3), st.builds(LoggedStep, st.integers(0, 50), st.floats(0, 1000)))

LINES = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 50), "attempt": st.integers(0, 2), "time": st.floats(0, 1000)},
        optional={"loss": NUMBERS, "eval_loss": NUMBERS},
    ),
    max_size=12,
)


@given(
    st.one_of(
        st.lists(st.one_of(EVENTS, EVENTS, EVENTS, st.none(), st.text(max_size=3)), max_size=25),
        likely_records(),
    ),
    st.floats(0, 1000),
    st.booleans(),
    LOGGED,
    st.one_of(LINES, LINES.map(lambda lines: sorted(lines, key=lambda line: line["time"]))),
)
def test_each_second_of_any_record_counts_exactly_once(events, now, tells, signs, lines):
    more = {"records_steps": tells, "logged": signs, "gaps": line_times(lines).gaps}
    known = [record for record in events if isinstance(record, dict)]
    times = in_order([seconds_or_none(record.get("time")) for record in known])
    end = max([now, *times[-1:]])
    begun = [
        time
        for record, time in zip(known, times, strict=True)
        if record["event"] == "submitted"
        or (record["event"] != "cancelled" and whole_number(record.get("attempt")) is not None)
    ]
    for goes_on in (True, False):
        goodput = measure(events, now=now, running=goes_on, pending=goes_on, **more)
        assert set(goodput.parts) <= set(KINDS)
        assert all(seconds >= 0 for attempt in goodput.attempts for seconds in attempt.parts.values())
        whole = end - begun[0] if begun else 0.0
        if goes_on:
            assert math.isclose(goodput.whole, whole, rel_tol=1e-9, abs_tol=1e-6)
        else:
            assert goodput.whole <= whole + 1e-6
        assert goodput.share is None or 0 <= goodput.share <= 1 + 1e-9
    phases = newest_phases(events)
    assert phases is None or all(seconds >= 0 for seconds in phases.seconds.values())
    both = measure([*events, *events], now=now, running=True, pending=True, **more)
    assert all(seconds >= 0 for attempt in both.attempts for seconds in attempt.parts.values())


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
    true = dict.fromkeys(KINDS, 0.0)
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
        signs[attempt] = LoggedStep(made + steps, time)
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
    goodput = measure(events, now=time, pending=True, logged=signs)
    assert goodput.whole == time
    assert goodput.parts == pytest.approx({kind: seconds for kind, seconds in true.items() if seconds})
