"""Choose the interval between copies of the state into memory: the shortest that costs less than 1 % of time.

All ranks copy at the same steps. The measurements of rank 0 travel with the data that the ranks exchange for
each copy, and each rank computes the next step from them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

SHARE = 0.008
"""The part of the training time to spend on copies: below 1 %, because their costs vary."""
FIRST_AFTER = 10
"""Number of steps before the first copy, in which the duration of a step is measured."""
_REMEMBERED = 32
"""Number of latest steps; their median duration is the duration of a usual step."""
_UNKNOWN_COST_S = 0.01
"""Assumed cost of the first copy, in seconds."""

Figures = tuple[float, float, float, float]
"""Seconds of a usual step, of the last copy, of all copies so far, and of all steps so far."""


def steps_until_next(figures: Figures) -> int:
    """Return the number of steps between a copy now and the next copy.

    It is the smallest number with which all copies, the next one included, take at most the part SHARE of the
    time of all steps, if steps and copies take as long as before.
    """
    step_s, cost_s, spent_s, trained_s = figures
    if step_s <= 0.0:
        return FIRST_AFTER

    # `spent_s` does not contain the copy now, nor the next one. The time of all steps up to the next copy
    # must be at least the time of all these copies divided by SHARE.
    for_all_copies = math.ceil(((spent_s + 2 * cost_s) / SHARE - trained_s) / step_s)
    for_next_copy = math.ceil(cost_s / SHARE / step_s)
    return max(1, for_all_copies, for_next_copy)


class SnapshotInterval:
    """Decides at which steps to copy the state into memory; all ranks count the same steps and agree."""

    def __init__(self, *, has_agent: bool) -> None:
        """Start to count the steps up to the first copy.

        Args:
            has_agent: whether an agent of slurmddp holds the copies. Without it, "auto" makes no copies.
        """
        self._has_agent = has_agent
        self._since = 0
        self._next = FIRST_AFTER
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._cost_s = _UNKNOWN_COST_S
        self._spent_s = 0.0
        self._trained_s = 0.0

    def step(self, seconds: float) -> None:
        """Count a step that took `seconds`."""
        self._steps.append(seconds)
        self._trained_s += seconds
        self._since += 1

    def is_due(self, every: int | Literal["auto"]) -> bool:
        """Decide whether to copy now.

        Args:
            every: the number of steps between two copies, "auto", or 0 for no copies.
        """
        if every == "auto":
            return self._has_agent and self._since >= self._next
        return 0 < every <= self._since

    @property
    def figures(self) -> Figures:
        """The measurements of this rank, see `Figures`."""
        usual_s = 0.0
        if self._steps:
            usual_s = sorted(self._steps)[len(self._steps) // 2]
        return usual_s, self._cost_s, self._spent_s, self._trained_s

    def copied(self, figures: Figures, cost_s: float) -> None:
        """Count a copy that took `cost_s` seconds on this rank, and choose the step of the next copy.

        Args:
            figures: the measurements of rank 0, so that all ranks choose the same step.
            cost_s: seconds.
        """
        self._cost_s = cost_s
        self._spent_s += cost_s
        self._since = 0
        self._next = steps_until_next(figures)
