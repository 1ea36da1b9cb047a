"""How often a state is copied into memory: as often as costs less than a hundredth of the steps' own time.

All ranks have to copy at the same steps. So rank 0 decides: what it has measured travels with what the ranks
exchange for a copy anyway, and each of them works the next step out from that.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

SHARE = 0.008
"""What is aimed at: copies differ, and a hundredth is not to be passed."""
FIRST_AFTER = 10
"""The first copy is made after so many steps of a process: until then nothing is measured."""
_REMEMBERED = 32
_UNKNOWN_COST_S = 0.01
"""What the first copy is taken to cost."""

Figures = tuple[float, float, float, float]
"""Seconds of a usual step, of the last copy, of all copies so far, and of all steps so far."""


def steps_until_next(figures: Figures) -> int:
    """Return after how many steps the next copy is due if one is made now.

    The two together, with all copies before them, then have cost no more than their share; and were all steps
    and copies like the last ones, they would go on so.
    """
    step_s, cost_s, spent_s, trained_s = figures
    if step_s <= 0.0:
        return FIRST_AFTER
    earned = math.ceil(((spent_s + 2 * cost_s) / SHARE - trained_s) / step_s)
    return max(1, earned, math.ceil(cost_s / SHARE / step_s))


class SnapshotInterval:
    """When the next copy is due; all ranks count the same steps, so they agree."""

    def __init__(self, *, keeps: bool) -> None:
        """Take note whether an agent `keeps` the copies; without one, `auto` makes none."""
        self._keeps = keeps
        self._since, self._next = 0, FIRST_AFTER
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._cost_s = _UNKNOWN_COST_S
        self._spent_s = self._trained_s = 0.0

    def step(self, seconds: float) -> None:
        """Count a step that took so many seconds."""
        self._steps.append(seconds)
        self._trained_s += seconds
        self._since += 1

    def is_due(self, every: int | Literal["auto"]) -> bool:
        """Return whether to copy now; `every` counts steps, or is `auto`, or 0 for never."""
        if every == "auto":
            return self._keeps and self._since >= self._next
        return 0 < every <= self._since

    @property
    def figures(self) -> Figures:
        """What this rank has measured."""
        usual_s = sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0
        return usual_s, self._cost_s, self._spent_s, self._trained_s

    def copied(self, figures: Figures, cost_s: float) -> None:
        """Count a copy that took `cost_s` here; `figures` are those of rank 0."""
        self._cost_s = cost_s
        self._spent_s += cost_s
        self._since, self._next = 0, steps_until_next(figures)
