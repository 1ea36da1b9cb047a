"""A strategy that sends a byte per weight: the ranks vote on the sign of each gradient.

signSGD with majority vote (Bernstein et al. 2018, arXiv:1810.05291). Each rank adds up its gradients with
momentum, and sends the signs only. All ranks then step in the direction of the majority. The votes of at most
127 ranks fit into a byte.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn


class MajorityVote:
    """Strategy that replaces each gradient by the sign of the sum of all ranks' signs before a step.

    Args:
        momentum: the share of its earlier sum that a rank adds to a gradient, from 0 to below 1.
    """

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = momentum
        self.bytes_sent = 0
        self._sums: list[torch.Tensor] = []
        """This rank's sum of gradients with momentum, for each parameter."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if distributed.is_initialized():
            for value in model.state_dict().values():
                distributed.broadcast(value, 0)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        # Nothing is sent before the step.
        return nullcontext()

    def setup_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sums = [torch.zeros_like(parameter) for parameter in parameters]
        optimizer.register_step_pre_hook(lambda *_: self._vote(parameters))
        return optimizer

    def _vote(self, parameters: list[nn.Parameter]) -> None:
        for parameter, total in zip(parameters, self._sums, strict=True):
            if parameter.grad is not None:
                total.mul_(self.momentum).add_(parameter.grad)

        votes = torch.cat([total.sign().flatten().to(torch.int8) for total in self._sums])
        if distributed.is_initialized():
            distributed.all_reduce(votes)
            self.bytes_sent += votes.nbytes

        sizes = [parameter.numel() for parameter in parameters]
        for parameter, vote in zip(parameters, votes.split(sizes), strict=True):
            parameter.grad = vote.sign().view_as(parameter).to(parameter.dtype)

    # The sums differ between ranks, and a resumed training needs them: a checkpoint contains all of them.

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for total, saved in zip(self._sums, state["sums"], strict=True):
            total.copy_(saved)
