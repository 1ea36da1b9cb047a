"""Collectives between workers, on tensors that they hold; each worker runs its part in program order.

Before a collective the workers agree on whether all operands are there. So a worker whose operand has failed
leaves no other worker waiting, and no result lacks a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

_TIMEOUT = timedelta(minutes=30)
_groups: dict[tuple[int, ...], Any] = {}

REDUCTIONS = {
    "sum": distributed.ReduceOp.SUM,
    "mean": distributed.ReduceOp.SUM,
    "min": distributed.ReduceOp.MIN,
    "max": distributed.ReduceOp.MAX,
    "product": distributed.ReduceOp.PRODUCT,
}


def run(failure: Exception | None, name: str, nodes: list[int], *operands: Any) -> list[torch.Tensor]:
    """Run this worker's part of a collective of workers `nodes`; return the tensors that it changes or makes.

    Raises:
        Exception: `failure`, which an operand of this worker holds.
        RuntimeError: an operand of another worker has failed.
    """
    group = _group_of(tuple(nodes))
    failed = torch.tensor([0 if failure is None else distributed.get_rank() + 1])
    distributed.all_reduce(failed, distributed.ReduceOp.MAX, group)
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(f"worker {int(failed) - 1} has no tensor for this collective: it failed there")
    made: list[torch.Tensor] = OPERATIONS[name](group, nodes, *operands)
    return made


def _group_of(nodes: tuple[int, ...]) -> Any:
    """Return the group of all workers, or make one at its first use that needs no other workers.

    `new_group` would do neither: it names a group by the number of earlier groups of each process, and so
    waits without end if two workers have been in different groups before.
    """
    if len(nodes) == distributed.get_world_size():
        return distributed.group.WORLD
    if nodes not in _groups:
        store = distributed.distributed_c10d._get_default_store()
        named = distributed.PrefixStore(f"controller/group/{nodes}", store)
        place = nodes.index(distributed.get_rank())
        _groups[nodes] = distributed.ProcessGroupGloo(named, place, len(nodes), _TIMEOUT)
    return _groups[nodes]


def all_reduce(
    group: Any, nodes: list[int], tensors: list[torch.Tensor], reduction: str
) -> list[torch.Tensor]:
    """Reduce the tensors of all workers in place."""
    flat = _summand(tensors, reduction, nodes)
    distributed.all_reduce(flat, REDUCTIONS[reduction], group)
    return _fill(tensors, flat)


def reduce(
    group: Any, nodes: list[int], tensors: list[torch.Tensor], reduction: str, node: int
) -> list[torch.Tensor]:
    """Reduce the tensors of all workers into those of worker `node`."""
    flat = _summand(tensors, reduction, nodes)
    distributed.reduce(flat, op=REDUCTIONS[reduction], group=group, group_dst=nodes.index(node))
    return _fill(tensors, flat) if distributed.get_rank() == node else tensors


def broadcast(group: Any, nodes: list[int], tensors: list[torch.Tensor], node: int) -> list[torch.Tensor]:
    """Give the tensors of worker `node` to all workers."""
    flat = _flat(tensors)
    distributed.broadcast(flat, group=group, group_src=nodes.index(node))
    return _fill(tensors, flat)


def all_gather(group: Any, nodes: list[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of all workers, in the order of the workers."""
    own = tensors[0].detach().contiguous()
    found = [torch.empty_like(own) for _ in nodes]
    distributed.all_gather(found, own, group)
    return found


def give(failure: Exception | None, tensor: torch.Tensor, node: int) -> list[torch.Tensor]:
    """Send a tensor to worker `node`, which runs `take`."""
    distributed.send(torch.tensor([failure is None]), node)
    if failure is not None:
        raise failure
    distributed.send(tensor.detach().contiguous(), node)
    return []


def take(node: int, shape: list[int], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Receive a tensor from worker `node`, which runs `give`."""
    is_there, found = torch.zeros(1, dtype=torch.bool), torch.empty(shape, dtype=dtype, device=device)
    distributed.recv(is_there, node)
    if not is_there:
        raise RuntimeError(f"worker {node} has no tensor to send: it failed there")
    distributed.recv(found, node)
    return [found]


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors as one tensor of one dimension in new memory."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _summand(tensors: Sequence[torch.Tensor], reduction: str, nodes: list[int]) -> torch.Tensor:
    """Return this worker's part of a reduction; the mean divides before it adds, as DDP does."""
    return _flat(tensors).mul_(1 / len(nodes)) if reduction == "mean" else _flat(tensors)


def _fill(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Copy the parts of `flat` back into the tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
    return tensors


OPERATIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (all_reduce, reduce, broadcast, all_gather)
}
