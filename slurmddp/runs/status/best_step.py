"""Find the best checkpoint of a run by its records, for status and report; no checkpoint is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.metrics import Curve, read
from slurmddp.settings.spec import parse_best


@dataclass(frozen=True)
class BestStep:
    """The step of the best checkpoint, and its value of the metric `name`."""

    step: int
    name: str
    value: float


def best_step(folder: RunFolder) -> BestStep | None:
    """Return the best step that was evaluated and saved, by `train.best`; of equal values the newest.

    Returns:
        None without `train.best`, or before such a step.

    Raises:
        SlurmddpError: the records can't be read, or the run's `train.best` is not understood.
    """
    train = folder.config().get("train")
    text = train.get("best") if isinstance(train, dict) else None
    if text is None:
        return None

    name, mode = parse_best(str(text))
    metrics = read(folder)
    curve = metrics.held_out if name == "eval_loss" else metrics.own.get(name, Curve())
    saved = {event.get("step") for event in folder.events() if event.get("event") == "saved"}

    # The least pair has the best value and, among equal values, the newest step.
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
