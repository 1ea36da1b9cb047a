"""Count the training time of all attempts, for `train.max_time`; rank 0 decides for all ranks."""

from __future__ import annotations

import time
from typing import Any

from slurmddp.collectives import values as collectives
from slurmddp.slurm.units import parse_duration_s


class TimeBudget:
    """The time that a training may take in all attempts together, evaluations included.

    Checkpoints contain the time used so far. So time after the last checkpoint of a failed attempt is not
    counted: its steps are repeated.

    Args:
        limit: the value of `train.max_time`; None: no limit, and no time in the checkpoints.
    """

    def __init__(self, limit: str | int | None) -> None:
        self._limit_s = None if limit is None else parse_duration_s(limit, "train.max_time")
        self._before_s = 0.0
        """The time of earlier attempts, up to the loaded checkpoint."""
        self._since = time.monotonic()

    def resume(self, progress: dict[str, Any]) -> None:
        """Continue to count from the time in the `progress` of a checkpoint; from 0 if it has none."""
        self._before_s = progress.get("trained_s", 0.0)
        self._since = time.monotonic()

    def progress(self) -> dict[str, float]:
        """Return the time used so far, for `progress` of a checkpoint; empty without a limit."""
        if self._limit_s is None:
            return {}
        return {"trained_s": self._trained_s}

    def is_used_up(self) -> bool:
        """Decide, by rank 0's clock, whether `train.max_time` is used up; all ranks call it and agree."""
        if self._limit_s is None:
            return False
        return collectives.from_zero(self._trained_s) >= self._limit_s

    @property
    def _trained_s(self) -> float:
        return self._before_s + time.monotonic() - self._since
