"""Count the training time of all attempts, for `train.max_time`; rank 0 decides for all ranks."""

from __future__ import annotations

import time
from typing import Any

from slurmddp.collectives import values as collectives
from slurmddp.slurm.units import parse_duration_s


class TimeBudget:
    """The time that a training may take over all attempts, evaluations included.

    The time is part of the checkpoints, so that steps which are repeated after a failure count once.

    Args:
        limit: the value of `train.max_time`; None: no limit, and no time in the checkpoints.
    """

    def __init__(self, limit: str | int | None) -> None:
        self._limit_s = None if limit is None else parse_duration_s(limit, "train.max_time")
        self._before_s = 0.0
        """The time of earlier attempts, up to the loaded checkpoint."""
        self._since = time.monotonic()

    def resume(self, progress: dict[str, Any]) -> None:
        """Continue from the time in a checkpoint's `progress`; if it has none, from 0."""
        self._before_s = progress.get("trained_s", 0.0)
        self._since = time.monotonic()

    def progress(self) -> dict[str, float]:
        """Return the values to save in a checkpoint."""
        if self._limit_s is None:
            return {}
        return {"trained_s": self._trained_s}

    def is_used_up(self) -> bool:
        """Return whether the time is over, alike on all ranks. All ranks call it; it is a collective."""
        if self._limit_s is None:
            return False
        return collectives.from_zero(self._trained_s) >= self._limit_s

    @property
    def _trained_s(self) -> float:
        return self._before_s + time.monotonic() - self._since
