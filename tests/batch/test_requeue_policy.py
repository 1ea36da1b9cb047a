"""The decision after an attempt, by the table that the tests of the whole batch step use as well."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.batch.progress import newest_step
from slurmddp.batch.requeue_policy import Counts, End, Policy, count_all, decide, exit_code
from slurmddp.errors import combine_exit_codes
from support.runs.outcome_table import CODES, PROGRESS, TABLE, Row


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.label)
def test_decisions_follow_the_table(row: Row) -> None:
    decision = decide(row.ended, row.before, row.policy)
    assert (decision.outcome, decision.next) == (row.outcome, row.next)


@pytest.mark.parametrize(("srun", "failure", "agents", "fate", "progressed", "expected"), CODES)
def test_the_code_of_an_attempt(
    srun: int, failure: int | None, agents: int | None, fate: str, progressed: bool, expected: int | None
) -> None:
    found = exit_code(srun, failure=failure, agents=agents, fate=fate, progressed=progressed)
    assert found == expected


@pytest.mark.parametrize(("before", "after", "progress"), PROGRESS)
def test_progress_is_a_later_step(before: str, after: str, progress: bool) -> None:
    assert (newest_step(after) > newest_step(before)) == progress


def test_the_table_has_every_outcome_and_no_label_twice() -> None:
    assert {row.outcome for row in TABLE} == {
        "finished",
        "stopped",
        "failed",
        "config",
        "no_progress",
        "cancelled",
    }
    assert len({row.label for row in TABLE}) == len(TABLE)


@given(
    code=st.integers(0, 255),
    failures=st.integers(0, 9),
    max_restarts=st.integers(0, 9),
    progressed=st.booleans(),
    requeue=st.booleans(),
)
def test_a_cancelled_run_never_runs_again(
    code: int, failures: int, max_restarts: int, progressed: bool, requeue: bool
) -> None:
    end = End(code, progressed=progressed, cancelled=True)
    assert decide(end, Counts(failures), Policy(requeue, max_restarts)).next == "none"


@given(code=st.integers(0, 255), failures=st.integers(0, 9))
def test_no_progress_ends_every_chain_of_failures(code: int, failures: int) -> None:
    decision = decide(End(code), Counts(failures), Policy(max_restarts=100))
    assert decision.next == "none" or code in (75, 76)


FAILED = {"event": "ended", "outcome": "failed"}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], Counts()),
        ([FAILED, FAILED], Counts(2)),
        ([FAILED, {**FAILED, "put_back": False}], Counts(1)),
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
