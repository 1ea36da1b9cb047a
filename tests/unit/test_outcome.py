"""What follows an attempt: the table that the batch script's shell is held to as well."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcome_table import PROGRESS, TABLE, Row

from slurmddp.launchers.outcome import Outcome, combine, decide, newest_step


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.label)
def test_decisions_follow_the_table(row: Row) -> None:
    assert decide(**row.given) == Outcome(row.outcome, row.next)


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
    exit_code=st.integers(0, 255),
    failures=st.integers(0, 9),
    max_restarts=st.integers(0, 9),
    progressed=st.booleans(),
    requeue=st.booleans(),
)
def test_a_cancelled_run_never_runs_again(
    exit_code: int, failures: int, max_restarts: int, progressed: bool, requeue: bool
) -> None:
    decision = decide(
        exit_code,
        failures=failures,
        max_restarts=max_restarts,
        progressed=progressed,
        cancelled=True,
        requeue=requeue,
    )
    assert decision.next == "none"


@given(exit_code=st.integers(0, 255), failures=st.integers(1, 9))
def test_no_progress_ends_every_chain_of_failures(exit_code: int, failures: int) -> None:
    decision = decide(
        exit_code, failures=failures, max_restarts=100, progressed=False, cancelled=False, requeue=True
    )
    assert decision.next == "none" or exit_code in (75, 76)


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
    assert combine(codes) == expected
