"""Collectives, copies and events between workers; each worker runs its part in the order of its commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def run(
    kind: str, tensors: list[Any], nodes: list[int], device: str, op: str | None, node: Any, changes: bool
) -> list[Any]:
    """Take this worker's part in a collective, and change its tensors in place if it `changes` them.

    Args:
        kind: `reduce`; `broadcast` or, for two workers, `copy` from `node`; `all_gather`, for which each
            worker has one tensor per worker, its own at its own place.
        tensors: those of this worker, of one dtype.
        nodes: the workers that take part.
        device: whence the bytes go and where they come in: `cpu` or `cuda`.
        op: the reduction; the mean divides before it adds, as DDP does.
        node: see `kind`.
        changes: whether this worker receives.

    Returns:
        `tensors`.
    """
    own = distributed.get_rank()
    group, place = _group_of(tuple(nodes)), nodes.index(own)
    with _agreement(group):
        if failures := [one for one in tensors if isinstance(one, Failure)]:
            raise failures[0]
        flats = [flatten(tensor) for tensor in tensors]
        flat = (flats[0] if kind == "copy" else torch.cat(flats)).to(device)
        if op == "mean":
            flat.mul_(1 / len(nodes))
    sent = flat.view(torch.uint8) if op is None else flat  # gloo does not send all dtypes.
    if kind == "reduce":
        distributed.all_reduce(sent, REDUCTIONS[str(op)], group)
    elif kind == "broadcast":
        distributed.broadcast(sent, group=group, group_src=nodes.index(node))
    elif kind == "copy":
        move = distributed.send if node == own else distributed.recv
        move(sent, nodes[1 - place])
    else:
        parts = list(sent.tensor_split(len(nodes)))
        distributed.all_gather(parts, parts[place], group)
    if changes:
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
    return tensors


@contextmanager
def _agreement(group: Any) -> Iterator[None]:
    """Let a block of code fail on all workers of a group if it fails on one.

    So a worker that can't take its part leaves no other worker waiting, and no result lacks a part.
    """
    failed = torch.zeros(1, dtype=torch.int64)
    try:
        yield
    except Exception:
        failed += distributed.get_rank() + 1
        raise
    finally:
        distributed.all_reduce(failed, distributed.ReduceOp.MAX, group)
    if failed:
        raise RuntimeError(f"worker {int(failed) - 1} has no tensor to send: it failed there")


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
