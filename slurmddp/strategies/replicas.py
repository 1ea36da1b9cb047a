"""Make the replicas of a model equal, average tensors over ranks, and define the base class `Replicas`."""

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
            hint="If the model is not to be trained, call it directly, without setup_model.",
        )


def refuse_sparse(model: nn.Module, setting: str) -> None:
    """Raise ConfigError if an embedding of `model` has sparse gradients; `setting` begins the message."""
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    if any(embedding.sparse for embedding in embeddings):
        raise ConfigError(
            f"{setting} can't exchange the sparse gradients of an embedding of {type(model).__name__}.",
            hint="Build the embedding with sparse=False, or use strategy=ddp without a comm_hook.",
        )


def broadcast_from_rank_zero(model: nn.Module) -> None:
    """Replace a model's parameters and buffers by those of rank 0; all ranks must call it."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            distributed.broadcast(value.detach(), src=0)


def average(tensors: Sequence[torch.Tensor]) -> None:
    """Replace tensors by their means over all ranks, by one all-reduce for each dtype and device.

    16-bit tensors are summed in float32: a sum could be infinite although the mean is not.

    Args:
        tensors: tensors of floating point dtypes, with the same shapes in the same order on all ranks.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        groups.setdefault((dtype, tensor.device), []).append(tensor)

    for (dtype, _), group in groups.items():
        flat = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in group])
        distributed.all_reduce(flat)
        flat /= distributed.get_world_size()

        means = torch.split(flat, [tensor.numel() for tensor in group])
        for tensor, mean in zip(group, means, strict=True):
            tensor.copy_(mean.view_as(tensor))


def collective_timeout() -> timedelta:
    """Return the time-out of the default group, to pass it to `new_group`, which has another default."""
    store: Any = distributed.distributed_c10d._get_default_store()
    timeout: timedelta = store.timeout
    return timeout


def trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return whether `optimizer` steps any parameter of `model`."""
    ids = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])


class Replicas:
    """Base class of strategies in which ranks exchange weights or gradients in the optimizer's step.

    The model is not wrapped.
    """

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Give `model` the weights and buffers of rank 0, and return it.

        Raises:
            ConfigError: no parameter requires a gradient.
        """
        if distributed.is_initialized():
            require_trainable(model)
            broadcast_from_rank_zero(model)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context without effect, because no backward pass exchanges gradients."""
        return nullcontext()
