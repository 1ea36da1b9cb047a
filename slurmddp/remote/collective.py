"""Collectives between workers, on tensors that they hold; each worker runs its part in program order.

Before a collective the workers agree on whether all operands are there. So a worker whose operand has failed
leaves no other worker waiting, and no result lacks a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

_groups: dict[tuple[int, ...], distributed.ProcessGroup] = {}

REDUCTIONS = {
    "sum": distributed.ReduceOp.SUM,
    "mean": distributed.ReduceOp.SUM,
    "min": distributed.ReduceOp.MIN,
    "max": distributed.ReduceOp.MAX,
    "product": distributed.ReduceOp.PRODUCT,
}


def group_of(nodes: Sequence[int]) -> distributed.ProcessGroup:
    """Return the process group of these workers, which alone make it at its first use."""
    key = tuple(nodes)
    if key not in _groups:
        _groups[key] = distributed.new_group(list(key), use_local_synchronization=True)
    return _groups[key]


def _agree(failure: Exception | None, group: distributed.ProcessGroup) -> None:
    """Raise on all workers if the operands of one of them have failed."""
    failed = torch.zeros(1, dtype=torch.int64)
    if failure is not None:
        failed += distributed.get_rank() + 1
    distributed.all_reduce(failed, op=distributed.ReduceOp.MAX, group=group)
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(f"worker {int(failed) - 1} has no tensor for this collective: it failed there")


def all_reduce(
    failure: Exception | None, nodes: list[int], tensors: list[torch.Tensor], reduction: str
) -> list[torch.Tensor]:
    """Reduce the tensors of all workers in place; the mean divides before it adds, as DDP does."""
    group = group_of(nodes)
    _agree(failure, group)
    flat = _flat(tensors)
    if reduction == "mean":
        flat.mul_(1 / len(nodes))
    distributed.all_reduce(flat, op=REDUCTIONS[reduction], group=group)
    return _fill(tensors, flat)


def reduce(
    failure: Exception | None, nodes: list[int], tensors: list[torch.Tensor], reduction: str, node: int
) -> list[torch.Tensor]:
    """Reduce the tensors of all workers into those of worker `node`."""
    group = group_of(nodes)
    _agree(failure, group)
    flat = _flat(tensors).clone()
    if reduction == "mean":
        flat.mul_(1 / len(nodes))
    distributed.reduce(flat, node, op=REDUCTIONS[reduction], group=group)
    return _fill(tensors, flat) if distributed.get_rank() == node else tensors


def broadcast(
    failure: Exception | None, nodes: list[int], tensors: list[torch.Tensor], node: int
) -> list[torch.Tensor]:
    """Give the tensors of worker `node` to all workers."""
    group = group_of(nodes)
    _agree(failure, group)
    flat = _flat(tensors)
    distributed.broadcast(flat, node, group=group)
    return _fill(tensors, flat)


def all_gather(
    failure: Exception | None, nodes: list[int], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors of all workers, in the order of the workers."""
    group = group_of(nodes)
    _agree(failure, group)
    own = tensors[0].detach().contiguous()
    found = [torch.empty_like(own) for _ in nodes]
    distributed.all_gather(found, own, group=group)
    return found


def give(failure: Exception | None, tensor: torch.Tensor, node: int) -> list[torch.Tensor]:
    """Send a tensor to worker `node`, which runs `take`."""
    distributed.send(torch.tensor([failure is None]), node)
    if failure is not None:
        raise failure
    distributed.send(tensor.detach().contiguous(), node)
    return []


def take(
    failure: Exception | None, node: int, shape: list[int], dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """Receive a tensor from worker `node`, which runs `give`."""
    is_there, found = torch.zeros(1, dtype=torch.bool), torch.empty(shape, dtype=dtype, device=device)
    distributed.recv(is_there, node)
    if not is_there:
        raise RuntimeError(f"worker {node} has no tensor to send: it failed there")
    distributed.recv(found, node)
    return [found]


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors as one of one dimension: a view of a single contiguous tensor, else a copy."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _fill(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Copy the parts of `flat` back into the tensors, unless they share its memory."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        if tensor.data_ptr() != part.data_ptr():
            tensor.detach().copy_(part.view(tensor.shape))
    return tensors


OPERATIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (all_reduce, reduce, broadcast, all_gather, give, take)
}
