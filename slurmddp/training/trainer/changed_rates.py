"""Apply a changed learning rate or weight decay of the configuration to a resumed run.

A checkpoint contains the optimizer's settings as its scheduler has left them. So a load also restores the
learning rate of the configuration at that time, and hides a later change of the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rates = Sequence[dict[str, float]]
"""For each group of parameters, the configured numbers by name: `lr` and `weight_decay`."""


def configured_rates(optimizer: Optimizer) -> list[dict[str, float]]:
    """Return the configured `lr` and `weight_decay` of each parameter group of a new optimizer.

    The dict of a group lacks a name if the group has no such number.
    """
    rates = []
    for group in optimizer.param_groups:
        # A scheduler changes `lr` as soon as it is created, and stores the configured rate as `initial_lr`.
        values = {"lr": group.get("initial_lr", group.get("lr")), "weight_decay": group.get("weight_decay")}
        rates.append({name: value for name, value in values.items() if isinstance(value, float | int)})

    return rates


def apply_changes(
    saved: Rates, configured: Rates, optimizer: Optimizer, scheduler: LRScheduler | None
) -> None:
    """Set in a loaded optimizer the learning rates and weight decays that the configuration has changed.

    The scheduler continues at its step, with rates in proportion to the new learning rate.

    Args:
        saved: the configured rates of the training that wrote the checkpoint.
        configured: the configured rates of this training.
        optimizer, scheduler: the objects with their loaded states.
    """
    if list(saved) == list(configured):
        return

    for group, before, after in zip(optimizer.param_groups, saved, configured, strict=True):
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
