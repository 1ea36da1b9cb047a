"""Collectives, copies and events between workers; each worker runs its part in the order of its commands.

Before a collective the workers agree on whether all operands are there. So a worker whose operand has failed
leaves no other worker waiting, and no result lacks a part. The functions of this module therefore also run on
operands that have failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass
class Failure(Exception):
    """The failure of a command on a worker, which takes the place of its results."""

    text: str
    traceback: str


def _group_of(nodes: tuple[int, ...]) -> Any:
    """Return the group of all workers, or make one at its first use that needs no other workers.

    `new_group` would do neither: it names a group by the number of earlier groups of each process, and so
    waits without end if two workers have been in different groups before.
    """
    if len(nodes) == distributed.get_world_size():
        return distributed.group.WORLD
    if nodes not in _groups:
        named = distributed.PrefixStore(f"controller/group/{nodes}", _store())
        place = nodes.index(distributed.get_rank())
        _groups[nodes] = distributed.ProcessGroupGloo(named, place, len(nodes), _TIMEOUT)
    return _groups[nodes]


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


def _agree(nodes: list[int], tensors: list[Any]) -> Any:
    """Return the group of workers `nodes`, once each of them has told whether its operands are there.

    Raises:
        Failure: an operand of this worker has failed.
        RuntimeError: an operand of another worker has failed.
    """
    group = _group_of(tuple(nodes))
    failure = next((one for one in tensors if isinstance(one, Failure)), None)
    failed = torch.tensor([0 if failure is None else distributed.get_rank() + 1])
    distributed.all_reduce(failed, distributed.ReduceOp.MAX, group)
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(f"worker {int(failed) - 1} has no tensor for this collective: it failed there")
    return group


def all_reduce(nodes: list[int], tensors: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    """Reduce the tensors of all workers in place."""
    group = _agree(nodes, tensors)
    flat = _summand(tensors, op, nodes)
    distributed.all_reduce(flat, REDUCTIONS[op], group)
    return _fill(tensors, flat)


def reduce(nodes: list[int], tensors: list[torch.Tensor], op: str, node: int) -> list[torch.Tensor]:
    """Reduce the tensors of all workers into those of worker `node`."""
    group = _agree(nodes, tensors)
    flat = _summand(tensors, op, nodes)
    distributed.reduce(flat, op=REDUCTIONS[op], group=group, group_dst=nodes.index(node))
    return _fill(tensors, flat) if distributed.get_rank() == node else tensors


def broadcast(nodes: list[int], tensors: list[torch.Tensor], node: int) -> list[torch.Tensor]:
    """Copy the tensors of worker `node` into those of all workers."""
    group = _agree(nodes, tensors)
    flat = _flat(tensors)
    distributed.broadcast(flat, group=group, group_src=nodes.index(node))
    return _fill(tensors, flat)


def all_gather(nodes: list[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the last tensor of each worker into the other tensors, which are contiguous."""
    group = _agree(nodes, tensors)
    distributed.all_gather(tensors[:-1], tensors[-1].detach().contiguous(), group)
    return tensors


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors as one tensor of one dimension in new memory."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _summand(tensors: Sequence[torch.Tensor], op: str, nodes: list[int]) -> torch.Tensor:
    """Return this worker's part of a reduction; the mean divides before it adds, as DDP does."""
    return _flat(tensors).mul_(1 / len(nodes)) if op == "mean" else _flat(tensors)


def _fill(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Copy the parts of `flat` back into the tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
    return tensors


# --- one worker to another


def give(tensor: torch.Tensor | Failure, node: int, device: str) -> None:
    """Send a tensor, from `device`, to worker `node`, which runs `take`."""
    distributed.send(torch.tensor([not isinstance(tensor, Failure)]), node)
    if isinstance(tensor, Failure):
        raise tensor
    distributed.send(tensor.detach().to(device).contiguous(), node)


def take(node: int, shape: list[int], dtype: torch.dtype, device: str, target: str) -> torch.Tensor:
    """Receive a tensor on `device` from worker `node`, which runs `give`; return it on `target`."""
    is_there, found = torch.zeros(1, dtype=torch.bool), torch.empty(shape, dtype=dtype, device=device)
    distributed.recv(is_there, node)
    if not is_there:
        raise RuntimeError(f"worker {node} has no tensor to send: it failed there")
    distributed.recv(found, node)
    return found.to(target)


def reach(event: str) -> None:
    """Tell the other workers, if there are any, that this worker has come to an event."""
    if distributed.is_initialized():
        _store().set(event, "reached")


def wait_for(event: str) -> None:
    """Return once the worker of an event has come to it."""
    _store().wait([event], _TIMEOUT)
