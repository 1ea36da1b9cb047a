"""A strategy that sends one byte per gradient: the ranks vote on the sign of each.

signSGD with majority vote (Bernstein et al. 2018, arXiv:1810.05291). Each rank adds up its gradients with
momentum, and sends the signs only. All ranks then step in the direction that most of them have named. A vote
of at most 127 ranks fits into a byte.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn


class MajorityVote:
    """Replaces each gradient by the sign of the sum of all ranks' signs, just before the optimizer's step.

    Args:
        momentum: how much of its earlier gradients a rank adds to the next; not below 0, and below 1.
    """

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = momentum
        self.bytes_sent = 0
        self._sums: list[torch.Tensor] = []

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if distributed.is_initialized():
            for value in model.state_dict().values():
                distributed.broadcast(value, 0)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()  # Nothing is sent before the step.

    def setup_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [one for one in model.parameters() if one.requires_grad]
        self._sums = [torch.zeros_like(one) for one in parameters]
        optimizer.register_step_pre_hook(lambda *_: self._vote(parameters))
        return optimizer

    def _vote(self, parameters: list[nn.Parameter]) -> None:
        for one, total in zip(parameters, self._sums, strict=True):
            if one.grad is not None:
                total.mul_(self.momentum).add_(one.grad)
        votes = torch.cat([total.sign().flatten().to(torch.int8) for total in self._sums])
        if distributed.is_initialized():
            distributed.all_reduce(votes)
            self.bytes_sent += votes.nbytes
        for one, sign in zip(parameters, votes.split([one.numel() for one in parameters]), strict=True):
            one.grad = sign.sign().view_as(one).to(one.dtype)

    # The sums differ by rank, and a resumed training needs them: each checkpoint keeps those of all ranks.

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for total, saved in zip(self._sums, state["sums"], strict=True):
            total.copy_(saved)
