"""Counts the training time of all attempts, for `train.max_time`; rank 0 decides for all ranks."""

from __future__ import annotations

import time
from typing import Any

from slurmddp.collectives import values as collectives
from slurmddp.slurm.units import parse_duration_s


class TimeBudget:
    """The time that a training may take, from the first step of an attempt to its end, evaluations included.

    Steps that are repeated after a failure count once, because the time is part of the checkpoints.

    Args:
        limit: the value of `train.max_time`; None: no limit, and no time in the checkpoints.
    """

    def __init__(self, limit: str | int | None) -> None:
        self._limit_s = None if limit is None else parse_duration_s(limit, "train.max_time")
        self._before_s, self._since = 0.0, time.monotonic()

    def resume(self, progress: dict[str, Any]) -> None:
        """Continue with the time of a checkpoint; without one, start from 0."""
        self._before_s, self._since = progress.get("trained_s", 0.0), time.monotonic()

    def progress(self) -> dict[str, float]:
        """Return the values to save in a checkpoint."""
        return {} if self._limit_s is None else {"trained_s": self._trained_s}

    def is_used_up(self) -> bool:
        """Return whether the time is over, equal on all ranks. All ranks call it; it is a collective."""
        if self._limit_s is None:
            return False
        return collectives.from_zero(self._trained_s) >= self._limit_s

    @property
    def _trained_s(self) -> float:
        return self._before_s + time.monotonic() - self._since
