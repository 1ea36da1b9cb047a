"""Decide when an evaluation is the best so far, so that `train.best` keeps a checkpoint of its step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from slurmddp.checkpoint.files import best_by_metric
from slurmddp.collectives import values as collectives
from slurmddp.settings.spec import parse_best


class BestCheckpoint:
    """The best value of the metric of `train.best` so far, equal on all ranks.

    Args:
        text: the value of `train.best`; None: no evaluation counts as the best.
    """

    def __init__(self, text: str | None) -> None:
        self.by = None if text is None else parse_best(text)
        """The name of the metric, and "min" or "max"."""
        self._value: float | None = None

    def resume(self, root: Path) -> None:
        """Read the best value of the metric from the checkpoints in `root`. All ranks call it."""
        by = self.by
        if by is None:
            return

        best = collectives.on_zero(lambda: best_by_metric.step_and_value(root, by))
        self._value = None if best is None else best[1]

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Decide whether the value of the metric is better than all values before; if so, store it."""
        if self.by is None:
            return False
        name, order = self.by
        value = metrics[name]
        if not math.isfinite(value):
            return False

        if self._value is not None:
            is_better = value < self._value if order == "min" else value > self._value
            if not is_better:
                return False
        self._value = value
        return True
