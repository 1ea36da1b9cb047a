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
    """The metric by which runs are compared: its name, its label, and which values are best.

    `mode` is `min` or `max`; empty if it is not known which values are best.
    """

    name: str
    label: str
    mode: str

    def curve(self, metrics: Metrics) -> Curve:
        """Return the curve of this metric from the metrics of a run; empty if the run lacks the metric."""
        named = {"loss": metrics.train, "eval_loss": metrics.held_out}
        return named.get(self.name) or metrics.own.get(self.name, Curve())

    def value(self, metrics: Metrics) -> float | None:
        """Return the best finite value of a run, or its last one if `mode` is empty; None without values."""
        values = [value for value in self.curve(metrics).values if math.isfinite(value)]
        if not values:
            return None
        if not self.mode:
            return values[-1]
        return {"min": min, "max": max}[self.mode](values)


def compared_metric(
    folders: Sequence[RunFolder], metrics: Sequence[Metrics], best: str = ""
) -> ComparedMetric | None:
    """Choose the metric by which runs are compared.

    The result is the metric in `best` or in the first `train.best` of the runs; else the held-out loss, else
    the training loss, else the first metric that a program logs. None if the runs have logged nothing.

    Args:
        folders: the run folders.
        metrics: the metrics of the runs, in the same order.
        best: the metric of a search, such as "max accuracy"; then `train.best` is not read.
    """
    texts: list[str | None] = [best]
    if not best:
        texts = [(folder.config().get("train") or {}).get("best") for folder in folders]

    for text in filter(None, texts):
        try:
            name, mode = parse_best(str(text))
        except ConfigError:
            continue
        if name:
            return ComparedMetric(name, f"best {'held-out loss' if name == 'eval_loss' else name}", mode)

    if any(len(values.held_out) for values in metrics):
        return ComparedMetric("eval_loss", "best held-out loss", "min")
    if any(len(values.train) for values in metrics):
        return ComparedMetric("loss", "lowest training loss", "min")

    names = [name for values in metrics for name in values.own]
    return ComparedMetric(names[0], f"last {names[0]}", "") if names else None
