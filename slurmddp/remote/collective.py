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


def _agreed_group(failure: Exception | None, nodes: list[int]) -> Any:
    """Return the process group of these workers; raise on all of them if operands of one have failed."""
    group, own = _group_of(tuple(nodes)), distributed.get_rank()
    failed = torch.tensor([0 if failure is None else own + 1])
    group.allreduce(
        [failed], _options(distributed.AllreduceOptions, reduceOp=distributed.ReduceOp.MAX)
    ).wait()
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(f"worker {int(failed) - 1} has no tensor for this collective: it failed there")
    return group


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


def _options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def all_reduce(
    failure: Exception | None, nodes: list[int], tensors: list[torch.Tensor], reduction: str
) -> list[torch.Tensor]:
    """Reduce the tensors of all workers in place; the mean divides before it adds, as DDP does."""
    group, flat = _agreed_group(failure, nodes), _flat(tensors)
    if reduction == "mean":
        flat.mul_(1 / len(nodes))
    group.allreduce([flat], _options(distributed.AllreduceOptions, reduceOp=REDUCTIONS[reduction])).wait()
    return _fill(tensors, flat)


def reduce(
    failure: Exception | None, nodes: list[int], tensors: list[torch.Tensor], reduction: str, node: int
) -> list[torch.Tensor]:
    """Reduce the tensors of all workers into those of worker `node`."""
    group, flat = _agreed_group(failure, nodes), _flat(tensors).clone()
    if reduction == "mean":
        flat.mul_(1 / len(nodes))
    root = nodes.index(node)
    options = _options(distributed.ReduceOptions, reduceOp=REDUCTIONS[reduction], rootRank=root)
    group.reduce([flat], options).wait()
    return _fill(tensors, flat) if distributed.get_rank() == node else tensors


def broadcast(
    failure: Exception | None, nodes: list[int], tensors: list[torch.Tensor], node: int
) -> list[torch.Tensor]:
    """Give the tensors of worker `node` to all workers."""
    group, flat = _agreed_group(failure, nodes), _flat(tensors)
    group.broadcast([flat], _options(distributed.BroadcastOptions, rootRank=nodes.index(node))).wait()
    return _fill(tensors, flat)


def all_gather(
    failure: Exception | None, nodes: list[int], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors of all workers, in the order of the workers."""
    group = _agreed_group(failure, nodes)
    own = tensors[0].detach().contiguous()
    found = [torch.empty_like(own) for _ in nodes]
    group.allgather([found], [own]).wait()
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
