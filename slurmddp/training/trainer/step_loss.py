"""Compute the loss of a step: the mean over the samples, or the tokens, of its batches on all ranks.

The mean of the batches' means equals the mean over all samples only if all batches count equally many. A loss
that counts tokens without their padding returns its sum and its count instead; the step divides the sum of
all sums by the sum of all counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slurmddp.checkpoint.state.shards import local
from slurmddp.training.distributon import Distributon


class StepLoss:
    """The loss of one optimizer step on this rank, accumulated over its batches.

    A loss may be a pair (sum, count). The step's loss is then the sum of all sums over the sum of all counts,
    which is known only after the last batch. So `add` divides each sum by an estimate, the mean count of the
    first batches of all ranks, and `finish` scales the gradients by the correct factor.

    Args:
        distributon: the launched Distributon of the training.
        accumulate: the number of batches of the step on each rank.
    """

    def __init__(self, distributon: Distributon, accumulate: int) -> None:
        self._distributon = distributon
        self._accumulate = accumulate
        # If the strategy does not average gradients in each step, ranks must not wait for each other. Then
        # each rank divides by its own counts.
        self._is_shared = getattr(distributon._strategy, "averages_gradients", True)
        self._value = torch.zeros((), device=distributon.device)
        """The sum of the batches' sums; if the loss function returns means, their sum over `accumulate`."""
        self._count: torch.Tensor | None = None
        """The sum of the batches' counts so far; None if the loss function returns means."""
        self._divisor = torch.ones(())
        """The number by which the sum of each batch is divided before its backward pass."""

    def add(self, loss: torch.Tensor | tuple[torch.Tensor, Any]) -> torch.Tensor:
        """Add the loss of one of the `accumulate` batches of a step; return the scalar to call `backward` on.

        Args:
            loss: the mean over the batch, a scalar; or a pair: the sum of the losses, and their number.
        """
        if isinstance(loss, torch.Tensor):
            self._value += loss.detach() / self._accumulate
            return loss

        total, count = loss
        count = torch.as_tensor(count, dtype=torch.float32, device=total.device)

        if self._count is None:
            self._divisor = self._mean(count)
            # Avoid a division by 0: the first batches of all ranks may have a count of 0, and later ones not.
            if self._accumulate > 1:
                self._divisor = self._divisor.clamp(min=1)
            self._count = torch.zeros_like(count)

        self._count += count
        self._value += total.detach()
        return total / self._divisor

    def finish(self, model: nn.Module) -> torch.Tensor:
        """Scale the gradients of the step after its last backward pass, and return the loss, a scalar.

        The loss of the step is the mean of the results of all ranks.
        """
        if self._count is None:
            return self._value
        if self._accumulate == 1:
            return self._value / self._divisor

        mean = self._mean(self._count)
        _scale_gradients(model, self._divisor * self._accumulate / mean)
        return self._value / mean

    def _mean(self, count: torch.Tensor) -> torch.Tensor:
        if self._is_shared:
            return self._distributon.all_reduce(count)
        # A rank whose count is 0 divides by 1: its sum is 0, so its gradient is 0 and not NaN.
        return torch.where(count == 0, 1, count)


def _scale_gradients(model: nn.Module, factor: torch.Tensor) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue

        values = gradient._values() if gradient.is_sparse else local(gradient)
        values.mul_(factor)
