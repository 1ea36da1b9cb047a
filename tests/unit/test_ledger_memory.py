"""Ranks that begin anew from a state in memory, which no event has told of: what of their steps is lost."""

from __future__ import annotations

import pytest
from run_events import ended, event, saved, started

from slurmddp.runs.ledger import account

BEGUN = [started(100), event("first_step", 110, 0, step=1), saved(121, 10)]
"""One step a second; each save takes one."""
FELL = [event("rank_failed", 141, 0), event("restarted", 141, 0, generation=1, step=30)]


def after(resumed: int) -> list[dict]:
    again = [event("resumed", 142, 0, step=resumed), event("first_step", 143, 0, step=resumed + 1)]
    return [*BEGUN, *FELL, *again, saved(150, 40), ended(150, "finished")]


@pytest.mark.parametrize(("resumed", "lost"), [(30, 0), (25, 5), (20, 10), (10, 20)])
def test_the_steps_after_that_state_are_lost(resumed: int, lost: int) -> None:
    parts = account(after(resumed), now=1e6).parts
    assert parts.get("lost", 0) == pytest.approx(lost, abs=1)
    assert parts["starting"] == 10 + 2
    assert sum(parts.values()) == pytest.approx(50)
