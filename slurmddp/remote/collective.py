"""Run collectives, copies and events between workers, as commands of each worker that takes part."""

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
class CommandFailure(Exception):
    """The failure of a command on a worker; the worker stores it in place of the command's results."""

    text: str
    traceback: str


def run(
    kind: str, tensors: list[Any], nodes: list[int], device: str, op: str | None, node: Any, changes: bool
) -> list[Any]:
    """Run this worker's part of a collective; change its tensors in place if it `changes` them.

    Args:
        kind: `reduce`, `broadcast` from `node`, `all_gather`, or `copy` from `node` to another worker. For
            `all_gather` each worker has one tensor per worker, and its contribution is at its place.
        tensors: the tensors of this worker, of one dtype.
        nodes: the workers that take part.
        device: the device of the exchanged bytes, `cpu` or `cuda`.
        op: the reduction; the mean divides before it adds, as DDP does.
        node: see `kind`.
        changes: whether this worker receives.

    Returns:
        `tensors`.
    """
    rank = distributed.get_rank()
    place = nodes.index(rank)
    group = _group_of(tuple(nodes))
    with _agreement(group):
        for tensor in tensors:
            if isinstance(tensor, CommandFailure):
                raise tensor

        flats = [flatten(tensor) for tensor in tensors]
        flat = (flats[0] if kind == "copy" else torch.cat(flats)).to(device)
        if op == "mean":
            flat.mul_(1 / len(nodes))

    # gloo does not send all dtypes.
    message = flat.view(torch.uint8) if op is None else flat
    if kind == "reduce":
        distributed.all_reduce(message, REDUCTIONS[str(op)], group)
    elif kind == "broadcast":
        distributed.broadcast(message, group=group, group_src=nodes.index(node))
    elif kind == "copy":
        move = distributed.send if node == rank else distributed.recv
        move(message, nodes[1 - place])
    else:
        parts = list(message.tensor_split(len(nodes)))
        distributed.all_gather(parts, parts[place], group)

    if changes:
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    return tensors


@contextmanager
def _agreement(group: Any) -> Iterator[None]:
    """Let a block of code fail on all workers of a group if it fails on one of them.

    So no worker waits for a worker that has failed, and no result lacks a part.
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
    """Return the process group of some workers; create it at its first use.

    Only the workers of the group take part. torch's `new_group` needs all workers. It also names a group by
    the number of earlier groups of each process, so workers that have been in different groups before would
    wait without end.
    """
    if len(nodes) == distributed.get_world_size():
        return distributed.group.WORLD

    if nodes not in _groups:
        store = distributed.PrefixStore(f"controller/group/{nodes}", _store())
        place = nodes.index(distributed.get_rank())
        _groups[nodes] = distributed.ProcessGroupGloo(store, place, len(nodes), _TIMEOUT)

    return _groups[nodes]


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


def await_gpu() -> None:
    """Wait until the GPU has run all kernels so far: this worker's Python code runs ahead of its GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def reach(event: str) -> None:
    """Announce to the other workers that this worker and its GPU have reached an event."""
    await_gpu()
    if distributed.is_initialized():
        _store().set(event, "reached")


def wait_for(event: str) -> None:
    """Wait until the worker of an event has reached it."""
    _store().wait([event], _TIMEOUT)
