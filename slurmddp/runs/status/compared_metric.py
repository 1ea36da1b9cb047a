"""The metric by which the runs of a sweep are compared, in its report and in a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurmddp.errors import ConfigError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.metrics import Curve, Metrics
from slurmddp.settings.spec import parse_best


@dataclass(frozen=True)
class ComparedMetric:
    """The name of the metric and its label; `mode` is `min` or `max`, empty if neither is known."""

    name: str
    label: str
    mode: str

    def curve(self, metrics: Metrics) -> Curve:
        """Return the curve of the metric in one run."""
        named = {"loss": metrics.train, "eval_loss": metrics.held_out}
        return named.get(self.name) or metrics.own.get(self.name, Curve())

    def value(self, metrics: Metrics) -> float | None:
        """Return the best value of a run, or its last one without a mode; None without a finite value."""
        values = [value for value in self.curve(metrics).values if math.isfinite(value)]
        if not values:
            return None
        return {"min": min, "max": max}[self.mode](values) if self.mode else values[-1]


def compared_metric(
    folders: Sequence[RunFolder], metrics: Sequence[Metrics], best: str = ""
) -> ComparedMetric | None:
    """Choose the metric of the comparison: `train.best`, else held-out loss, training loss, an own metric.

    Args:
        folders: the runs.
        metrics: their metrics.
        best: the metric of a search, in place of `train.best`.
    """
    configured = [(folder.config().get("train") or {}).get("best") for folder in folders]
    for text in [best] if best else configured:
        try:
            name, mode = parse_best(str(text)) if text else ("", "")
        except ConfigError:
            continue
        if name:
            return ComparedMetric(name, f"best {'held-out loss' if name == 'eval_loss' else name}", mode)
    if any(map(len, (one.held_out for one in metrics))):
        return ComparedMetric("eval_loss", "best held-out loss", "min")
    if any(map(len, (one.train for one in metrics))):
        return ComparedMetric("loss", "lowest training loss", "min")
    own = [name for one in metrics for name in one.own]
    return ComparedMetric(own[0], f"last {own[0]}", "") if own else None
