"""Tensors of which each rank holds a shard: torch's DTensor, as fully_shard makes them.

A DTensor is known by its module, which only a strategy with shards imports: the import takes half a second.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def is_sharded(value: object) -> bool:
    """Tell whether `value` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def has_shards(value: object) -> bool:
    """Tell whether a module has parameters, or an optimizer trains parameters, that are DTensors."""
    if isinstance(value, nn.Module):
        return any(map(is_sharded, value.parameters()))
    return isinstance(value, Optimizer) and any(map(is_sharded, _trained(value)))


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor; another tensor as it is."""
    found: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return found


def whole(tensor: Any) -> torch.Tensor:
    """Return all of a DTensor, whose ranks all call it; another tensor as it is."""
    found: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found


def with_whole_tensors(state: Any, *, keep: bool) -> Any:
    """Return a state with whole tensors, on the CPU, in place of DTensors; all ranks call it.

    Args:
        state: as in a checkpoint, with the same DTensors in the same order on all ranks.
        keep: whether this rank needs the result. Otherwise it frees each tensor at once.
    """

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        if not is_sharded(tensor):
            return tensor
        full = whole(tensor.detach())
        return full.cpu() if keep else full[:0]

    return mapped(state, gather)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a nested state in which `change` has replaced each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (dict, OrderedDict, Counter):
        copy = type(value)()
        for key, item in value.items():
            copy[key] = mapped(item, change)
        if hasattr(value, "_metadata"):  # The versions of a module's submodules.
            copy._metadata = value._metadata
        return copy
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    return value


def fitted(saved: Any, target: Any) -> Any:
    """Return a saved state with each tensor sharded, or whole, as the tensors of `target` are.

    All ranks call it. Objects other than modules and torch's optimizers get their state as it is.
    """
    if not isinstance(saved, Mapping) or not has_shards(target):
        return saved
    if isinstance(target, nn.Module):
        present = target.state_dict()
        changed = mapped(saved, lambda tensor: tensor)
        for key, value in saved.items():
            changed[key] = _like(value, present.get(key))
        return changed
    states = dict(saved["state"])
    for number, parameter in enumerate(_trained(target)):
        if number in states:
            states[number] = {key: _like(one, parameter) for key, one in states[number].items()}
    return {**saved, "state": states}


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _like(value: Any, like: Any) -> Any:
    """Return `value` with the placement of the tensor `like`, if both have the same shape."""
    if not (isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor) and value.shape == like.shape):
        return value
    if is_sharded(like) == is_sharded(value):
        return value
    if is_sharded(value):
        return whole(value)
    from torch.distributed.tensor import distribute_tensor

    # All ranks have read the whole tensor, so that none sends it.
    placed: Any = like
    return distribute_tensor(
        value.to(local(like).device), placed.device_mesh, placed.placements, src_data_rank=None
    )
