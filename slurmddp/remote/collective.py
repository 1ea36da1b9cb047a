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
    """The failure of a command on a worker. The worker stores it in place of the command's results.

    `text` is its message, and `traceback` the traceback as text.
    """

    text: str
    traceback: str


def run(
    kind: str, tensors: list[Any], nodes: list[int], device: str, op: str | None, node: Any, changes: bool
) -> list[Any]:
    """Take part in a collective of several workers; the controller calls this as a command on each of them.

    Args:
        kind: the collective: `reduce`, `broadcast` from `node`, `all_gather`, or `copy` from `node` to one
            other worker. For `all_gather` each worker gives one tensor per worker; the tensor at its own
            position is sent, and the others are filled.
        tensors: the tensors of this worker, of one dtype.
        nodes: the numbers of the workers that take part.
        device: the type of device whose memory the exchange uses, `cpu` or `cuda`.
        op: the name of the reduction; None for other collectives. The mean divides before it adds, as DDP
            does.
        node: the number of the sending worker, see `kind`.
        changes: whether this worker's tensors are replaced by the result.

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

    # Without a reduction, exchange the bytes, because gloo does not support all dtypes.
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
    """Run a block; if it fails on one worker of a group, raise an error on all workers of the group.

    Without it, the other workers would wait for the worker that has failed.
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
        raise RuntimeError(f"worker {int(failed) - 1} failed before the exchange of tensors")


def _group_of(nodes: tuple[int, ...]) -> Any:
    """Return the process group of the workers `nodes`; create it at its first use.

    torch's `new_group` is not used: all workers would have to call it. It also numbers the groups in each
    process, so workers that were in different groups before would wait for each other forever.
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
    """Wait until this worker's GPU has run all kernels that were started; do nothing without CUDA."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def reach(event: str) -> None:
    """Announce in the store that this worker and its GPU have run all commands before the event `event`."""
    await_gpu()
    if distributed.is_initialized():
        _store().set(event, "reached")


def wait_for(event: str) -> None:
    """Wait until another worker has called `reach` for the event `event`, for at most _TIMEOUT."""
    _store().wait([event], _TIMEOUT)
