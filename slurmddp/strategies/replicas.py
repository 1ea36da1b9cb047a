"""The start of equal replicas, and the base of strategies that exchange nothing in a backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import distributed, nn

from slurmddp.errors import ConfigError


def require_trainable(model: nn.Module) -> None:
    """Raise ConfigError if no parameter of a model requires a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient.",
            hint="Call it directly, without setup_model, if it is not meant to be trained.",
        )


def broadcast_from_rank_zero(model: nn.Module) -> None:
    """Replace parameters and buffers by the values of rank 0; all ranks call it."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            distributed.broadcast(value.detach(), src=0)


class Replicas:
    """The base of a strategy that exchanges in or after optimizer steps: it leaves the model unwrapped."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model, with the weights of rank 0; raises ConfigError if it can't be trained."""
        if distributed.is_initialized():
            require_trainable(model)
            broadcast_from_rank_zero(model)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context without effect: a backward pass exchanges nothing."""
        return nullcontext()
