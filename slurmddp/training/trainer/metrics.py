"""Metrics of the held-out data: a function of (outputs, targets) per name, summed over batches and ranks.

slurmddp train metrics=accuracy                                  # conf/metrics/accuracy.yaml
slurmddp train metrics.f1._target_=my_project.f1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from slurmddp.errors import ConfigError
from slurmddp.training.trainer.batch import kind_of

Metric = Callable[[Any, Any], Any]
"""A function of (outputs, targets). It returns the mean over the batch's samples, or a pair (sum, count)."""
Sums = dict[str, tuple[float, float]]
"""The sum and the count of each metric."""


def accuracy(outputs: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100) -> tuple[float, int]:
    """Count the predictions that are right: the class with the highest score is the target.

    Args:
        outputs: the score of each class, shape (..., classes).
        targets: shape (...), int64 class numbers.
        ignore_index: targets of this class number are ignored, as in torch's cross_entropy.

    Returns:
        The number of right predictions, and the number of targets that are not ignored.

    Raises:
        ConfigError: `outputs` or `targets` has another shape or dtype.
    """
    tensors = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    if not tensors or outputs.shape[:-1] != targets.shape or targets.dtype != torch.int64:
        raise ConfigError(
            f"The metric accuracy got outputs that are {kind_of(outputs)} and targets that are "
            f"{kind_of(targets)}.",
            hint="It needs outputs (..., classes) and targets (...) of class numbers, int64. For other data "
            "name a function of your own in metrics.NAME._target_.",
        )

    counted = targets != ignore_index
    right = (outputs.argmax(dim=-1) == targets) & counted
    return int(right.sum()), int(counted.sum())


def add(sums: Sums, name: str, value: Any, samples: int) -> None:
    """Add the value of a metric for a batch to the sums.

    Args:
        sums: the sums of all metrics so far; changed in place.
        name: the name of the metric.
        value: the mean over the samples of the batch, or a pair (sum, count).
        samples: the number of samples in the batch.

    Raises:
        ConfigError: `value` is neither a number nor a pair of numbers.
    """
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    try:
        if is_pair:
            total = float(value[0])
            count = float(value[1])
        else:
            total = float(value) * samples
            count = float(samples)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"The metric {name} gives a value that is {kind_of(value)}.",
            hint="Return one number, the mean over the samples of the batch, or a pair (sum, count).",
        ) from error

    total_before, count_before = sums.get(name, (0.0, 0.0))
    sums[name] = (total_before + total, count_before + count)


def means(parts: Iterable[Sums]) -> dict[str, float]:
    """Return the mean of each metric by name, given the sums of all ranks; NaN if a count is 0."""
    totals: Sums = {}
    for part in parts:
        for name, (total, count) in part.items():
            add(totals, name, (total, count), 0)

    return {name: total / count if count else math.nan for name, (total, count) in totals.items()}
