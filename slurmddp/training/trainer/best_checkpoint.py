"""Decides when an evaluation is the best one so far, so that `train.best` keeps a checkpoint of its step."""

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
        text: the value of `train.best`; None: no checkpoint is the best one.
    """

    def __init__(self, text: str | None) -> None:
        self.by = None if text is None else parse_best(text)
        """The name of the metric, and "min" or "max"."""
        self._value: float | None = None

    def resume(self, root: Path) -> None:
        """Take the best value of the checkpoints under `root`. All ranks call it."""
        if (by := self.by) is not None:
            found = collectives.on_zero(lambda: best_by_metric.step_and_value(root, by))
            self._value = None if found is None else found[1]

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Tell whether an evaluation is better than all before it, and remember its value."""
        if self.by is None or not math.isfinite(value := metrics[self.by[0]]):
            return False
        is_better = self._value is None or (
            value < self._value if self.by[1] == "min" else value > self._value
        )
        if is_better:
            self._value = value
        return is_better
