"""The interval between copies into memory, computed alike on all ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurmddp.training.checkpointing.snapshot_interval import (
    FIRST_AFTER,
    SHARE,
    SnapshotInterval,
    steps_until_next,
)

durations = st.floats(1e-4, 100.0)


@given(step_s=durations, cost_s=st.floats(1e-5, 100.0))
def test_copies_never_exceed_their_share(step_s: float, cost_s: float) -> None:
    """From the second copy on; the first one is what tells the cost."""
    trained, spent, cost_before = FIRST_AFTER * step_s, 0.0, 0.01
    for copy in range(8):
        steps = steps_until_next((step_s, cost_before, spent, trained))
        if copy > 1:
            assert spent + cost_s <= SHARE * trained * (1 + 1e-6)
        spent, cost_before = spent + cost_s, cost_s
        trained += steps * step_s


@given(step_s=durations, cost_s=durations, spent_s=durations, trained_s=durations)
def test_slower_copies_never_come_sooner(
    step_s: float, cost_s: float, spent_s: float, trained_s: float
) -> None:
    usual = steps_until_next((step_s, cost_s, spent_s, trained_s))
    assert 1 <= usual <= steps_until_next((step_s, 2 * cost_s, spent_s, trained_s))
    assert usual <= steps_until_next((step_s, cost_s, 2 * spent_s, trained_s))


def test_the_cost_converges_to_the_share() -> None:
    pace = SnapshotInterval(has_agent=True)
    for _ in range(100_000):
        pace.step(0.01)
        if pace.is_due("auto"):
            pace.copied(pace.figures, 0.004)
    _, _, spent_s, trained_s = pace.figures
    assert 0.8 * SHARE < spent_s / trained_s <= SHARE


def test_ranks_with_other_measurements_copy_at_the_same_steps() -> None:
    ranks = [SnapshotInterval(has_agent=True) for _ in range(3)]
    due = []
    for step in range(2000):
        for number, pace in enumerate(ranks):
            pace.step(0.01 * (number + 1))
        answers = [pace.is_due("auto") for pace in ranks]
        assert len(set(answers)) == 1
        if answers[0]:
            due.append(step)
            figures = ranks[0].figures
            for number, pace in enumerate(ranks):
                pace.copied(figures, 0.003 * (number + 1))
    assert len(due) > 10
    assert due[0] == FIRST_AFTER - 1


def test_a_chosen_interval_is_used() -> None:
    fixed = SnapshotInterval(has_agent=False)
    due = []
    for step in range(1, 10):
        fixed.step(0.001)
        if fixed.is_due(3):
            due.append(step)
            fixed.copied(fixed.figures, 5.0)
    assert due == [3, 6, 9]
    for _ in range(100):
        fixed.step(1.0)
        assert not fixed.is_due(0) and not fixed.is_due("auto"), "nobody keeps what `auto` would copy"
