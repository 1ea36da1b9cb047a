"""Provide learning rate schedules for `scheduler._target_`, which also accepts the schedules of torch."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from slurmddp.errors import ConfigError


def cosine(
    optimizer: Optimizer, *, steps: int, warmup_steps: int | None = 0, final_fraction: float = 0.1
) -> LambdaLR:
    """Return a schedule in which learning rates rise linearly, then fall along half a cosine.

    Source: Loshchilov and Hutter, "SGDR: Stochastic gradient descent with warm restarts", 2017.

    Args:
        optimizer: its learning rates are the highest rates, after the rise.
        steps: the number of steps of the training.
        warmup_steps: the number of steps of the rise; None: a twentieth of `steps`.
        final_fraction: the rate at `steps`, as a fraction of the highest rate, from 0 to 1.

    Raises:
        ConfigError: a number is out of range.
    """
    if warmup_steps is None:
        warmup_steps = steps // 20

    if not 0 <= warmup_steps <= steps or steps < 1:
        raise ConfigError(
            f"scheduler.warmup_steps is {warmup_steps} with {steps} steps in all.",
            hint="Give a number of steps from 0 to the length of the training.",
        )

    if not 0 <= final_fraction <= 1:
        raise ConfigError(
            f"scheduler.final_fraction is {final_fraction}.",
            hint="Give a fraction of the highest learning rate, from 0 to 1.",
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)

        progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


def constant(optimizer: Optimizer, *, warmup_steps: int = 0) -> LambdaLR:
    """Return a schedule in which learning rates rise linearly over `warmup_steps`, then stay constant."""
    if warmup_steps < 0:
        raise ConfigError(
            f"scheduler.warmup_steps is {warmup_steps}.", hint="Give a number of steps, 0 or more."
        )

    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup_steps + 1)))
