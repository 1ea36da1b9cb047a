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


class MemoryPace:
    """When the next copy is due; `every` as `train.memory_save_every` says."""

    def __init__(self, every: int | Literal["auto"], *, keeps: bool) -> None:
        """With `keeps` False nobody would hand a copy on, so `auto` makes none."""
        self._every = (None if keeps else 0) if every == "auto" else every
        self._left = self._every or FIRST_AFTER
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._cost_s = _UNKNOWN_COST_S
        self._spent_s = self._trained_s = 0.0

    def step(self, seconds: float) -> bool:
        """Take note of a step; return whether a copy is due after it: the same on all ranks."""
        self._steps.append(seconds)
        self._trained_s += seconds
        self._left -= 1
        return self._every != 0 and self._left <= 0

    @property
    def figures(self) -> Figures:
        """What was measured here, for rank 0 to tell."""
        usual_s = sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0
        return usual_s, self._cost_s, self._spent_s, self._trained_s

    def copied(self, told: Figures, cost_s: float) -> None:
        """Take note of a copy that was made, of what rank 0 has told, and of what it has cost here."""
        self._cost_s = cost_s
        self._spent_s += cost_s
        self._left = self._every or steps_until_next(told)
