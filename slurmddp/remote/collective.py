"""Collectives, copies and events between workers; each worker runs its part in the order of its commands."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from slurmddp.remote.message_encoding import flatten

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


def run(kind: str, tensors: list[Any], nodes: list[int], device: str, op: str | None, node: Any) -> list[Any]:
    """Take this worker's part in a collective, and change its tensors in place.

    Args:
        kind: `reduce` into the tensors of `node`, or of all; `broadcast` or, for two workers, `copy` from
            `node`; `all_gather`, for which each worker has one tensor per worker, its own at its own place.
        tensors: those of this worker, of one dtype.
        nodes: the workers that take part.
        device: whence the bytes go and where they come in: `cpu` or `cuda`.
        op: the reduction; the mean divides before it adds, as DDP does.
        node: see `kind`.

    Returns:
        `tensors`.
    """
    own = distributed.get_rank()
    group, place = _agree(nodes, tensors), nodes.index(own)
    flats = [flatten(tensor) for tensor in tensors]
    flat = (flats[0] if kind == "copy" else torch.cat(flats)).to(device)
    sent = flat.view(torch.uint8) if op is None else flat  # gloo does not send all dtypes.
    if op == "mean":
        flat.mul_(1 / len(nodes))
    if kind == "reduce":
        distributed.all_reduce(sent, REDUCTIONS[str(op)], group)
    elif kind == "broadcast":
        distributed.broadcast(sent, group=group, group_src=nodes.index(node))
    elif kind == "copy":
        move = distributed.send if node == own else distributed.recv
        move(sent, nodes[1 - place])
    else:
        parts = list(sent.tensor_split(len(nodes)))
        distributed.all_gather(parts, parts[place].clone(), group)
    if node not in (None, own) if kind == "reduce" else node == own:
        return tensors
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
    return tensors


def _agree(nodes: list[int], tensors: list[Any]) -> Any:
    """Return the group of workers `nodes`, once each of them has told whether its operands are there.

    So a worker whose operand has failed leaves no other worker waiting, and no result lacks a part.

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
        raise RuntimeError(f"worker {int(failed) - 1} has no tensor to send: it failed there")
    return group


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


def await_gpu() -> None:
    """Wait until the GPU has run all kernels so far: this worker's Python runs ahead of it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def reach(event: str) -> None:
    """Tell the other workers, if there are any, that this worker and its GPU have come to an event."""
    await_gpu()
    if distributed.is_initialized():
        _store().set(event, "reached")


def wait_for(event: str) -> None:
    """Return once the worker of an event has come to it."""
    _store().wait([event], _TIMEOUT)
