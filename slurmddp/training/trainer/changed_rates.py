"""Lets a resumed run take a learning rate or weight decay that its configuration has changed.

A checkpoint holds the settings of the optimizer, so that a load restores what a scheduler has made of them.
It restores the learning rate of the configuration at that time, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rates = Sequence[dict[str, float]]
"""Of each group of parameters, the configured learning rate and weight decay."""


def configured_rates(optimizer: Optimizer) -> list[dict[str, float]]:
    """Return the rates before the first step; a scheduler keeps its first learning rate in the group."""
    rates = []
    for group in optimizer.param_groups:
        given = {"lr": group.get("initial_lr", group.get("lr")), "weight_decay": group.get("weight_decay")}
        rates.append({name: value for name, value in given.items() if isinstance(value, float | int)})
    return rates


def apply_changes(saved: Rates, now: Rates, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Give the rates of the present configuration to a loaded optimizer, where they have changed.

    The schedule of the learning rate continues at its step, in proportion to the new rate.

    Args:
        saved: the configured rates of the training that wrote the checkpoint.
        now: those of this training.
        optimizer, scheduler: with their loaded states.
    """
    if list(saved) == list(now):
        return
    for group, before, after in zip(optimizer.param_groups, saved, now, strict=True):
        if before.get("weight_decay") != after.get("weight_decay"):
            group["weight_decay"] = after["weight_decay"]
        if before.get("lr") != after.get("lr"):
            _change_lr(group, before["lr"], after["lr"])
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if hasattr(part, "base_lrs"):
            part.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]


def _change_lr(group: dict[str, Any], before: float, after: float) -> None:
    group["lr"] = group["lr"] / before * after if before else after
    if "initial_lr" in group:
        group["initial_lr"] = after
