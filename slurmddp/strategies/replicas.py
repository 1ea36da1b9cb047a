"""Equal replicas: their start, their average, and the base of strategies that average no gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from slurmddp.errors import ConfigError


def require_trainable(model: nn.Module) -> None:
    """Raise ConfigError if no parameter of a model requires a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient.",
            hint="Call it directly, without setup_model, if it is not meant to be trained.",
        )


def refuse_sparse(model: nn.Module, setting: str) -> None:
    """Raise ConfigError if an embedding of a model has sparse gradients."""
    if any(isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse for one in model.modules()):
        raise ConfigError(
            f"{setting} can't exchange the sparse gradients of an embedding of {type(model).__name__}.",
            hint="Build the embedding with sparse=False, or use strategy=ddp without a comm_hook.",
        )


def broadcast_from_rank_zero(model: nn.Module) -> None:
    """Replace parameters and buffers by the values of rank 0; all ranks call it."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            distributed.broadcast(value.detach(), src=0)


def average(tensors: Sequence[torch.Tensor]) -> None:
    """Replace tensors by their means over all ranks, by one all-reduce for each dtype and device.

    16-bit tensors are summed in float32: a sum could be infinite although the mean is not.

    Args:
        tensors: of floating point types, and of the same shapes in the same order on all ranks.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for one in tensors:
        wide = torch.promote_types(one.dtype, torch.float32)
        kinds.setdefault((wide, one.device), []).append(one)
    for (wide, _), group in kinds.items():
        flat = torch.cat([one.detach().reshape(-1).to(wide) for one in group])
        distributed.all_reduce(flat)
        flat /= distributed.get_world_size()
        means = torch.split(flat, [one.numel() for one in group])
        for one, mean in zip(group, means, strict=True):
            one.copy_(mean.view_as(one))


def collective_timeout() -> timedelta:
    """Return the longest wait in a collective. torch gives it to the default group only."""
    store: Any = distributed.distributed_c10d._get_default_store()
    timeout: timedelta = store.timeout
    return timeout


def trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Tell whether an optimizer has a parameter of a model."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


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
