"""The counts before a decision; test_end.py proves the decisions through the whole batch step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.batch.requeue_policy import Counts, End, count_all, decide
from slurmddp.errors import combine_exit_codes
from slurmddp.settings.schema import PolicySettings


@given(code=st.integers(0, 255), failures=st.integers(0, 9))
def test_no_progress_ends_every_chain_of_failures(code: int, failures: int) -> None:
    decision = decide(End(code), Counts(failures), PolicySettings(max_restarts=100))
    assert decision.next == "none" or code in (75, 76)


FAILED = {"event": "ended", "outcome": "failed"}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], Counts()),
        ([FAILED, FAILED], Counts(2)),
        ([FAILED, {**FAILED, "requeued": False}], Counts(1)),
        ([FAILED, {"event": "submitted"}], Counts()),
        ([FAILED, {"event": "submitted", "resubmitted": True}], Counts(1)),
        ([{**FAILED, "progressed": True}, {"event": "ended", "outcome": "stopped"}], Counts(1, 0, True)),
        ([{**FAILED, "progressed": True}, FAILED], Counts(2)),
        ([{"event": "ended", "without_progress": 2}], Counts(0, 2)),
        ([{"event": "ended", "without_progress": 2}, {"event": "ended"}], Counts()),
        ([{"event": "ended", "stalled_at": "step-4"}] * 2, Counts(stalls={"step-4": 2})),
        ([{"event": "warned"}, {}], Counts()),
    ],
)
def test_events_are_counted_since_a_person_submitted(events: list[dict], expected: Counts) -> None:
    assert count_all(events) == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0), 0),
        ((0, 75), 75),
        ((75, 1), 1),
        ((75, -9), 1),
        ((1, 78), 78),
        ((-15, 79), 79),
        ((1, 76, 0), 76),
        ((79, 78), 78),
        ((137, 0), 1),
        ((), 0),
    ],
)
def test_one_code_for_many_processes(codes: tuple[int, ...], expected: int) -> None:
    assert combine_exit_codes(codes) == expected
