"""The start of replicas: a model that can be trained, with the weights of rank 0 on all ranks."""

from __future__ import annotations

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
    """Replace parameters and buffers by those of rank 0; all ranks call it."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            distributed.broadcast(value.detach(), src=0)
