"""Find the best checkpoint of a run by its records, for status and report; no checkpoint is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.metrics import Curve, read
from slurmddp.settings.spec import parse_best


@dataclass(frozen=True)
class BestStep:
    """The step of a run's best checkpoint, and the value of the metric `name` at this step."""

    step: int
    name: str
    value: float


def best_step(folder: RunFolder) -> BestStep | None:
    """Return the step with the best value of the metric in `train.best`, among the steps that were saved.

    Of steps with equal values, the newest is returned.

    Returns:
        None if `train.best` is not set, or if no saved step has a finite value of the metric.

    Raises:
        SlurmddpError: the configuration, events or metrics can't be read, or `train.best` has a wrong format.
    """
    train = folder.config().get("train")
    text = train.get("best") if isinstance(train, dict) else None
    if text is None:
        return None

    name, mode = parse_best(str(text))
    metrics = read(folder)
    curve = metrics.held_out if name == "eval_loss" else metrics.own.get(name, Curve())
    saved = {event.get("step") for event in folder.events() if event.get("event") == "saved"}

    # With these signs the smallest pair has the best value and, among equal values, the newest step.
    sign = 1 if mode == "min" else -1
    pairs = [
        (sign * value, -step)
        for step, value in zip(curve.steps, curve.values, strict=True)
        if step in saved and math.isfinite(value)
    ]
    if not pairs:
        return None
    value, step = min(pairs)
    return BestStep(-step, name, sign * value)
