"""What ranks tell each other besides gradients; a rank that is the only one asks itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from slurmddp.errors import SlurmddpError

T = TypeVar("T")


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def gather(value: T, error: Exception | None = None) -> list[T]:
    """Return every rank's `value`, in the order of ranks, on every rank.

    Raises on every rank if any rank has an `error`: its own, or that of the first rank that has one.
    """
    if error is None and world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    sent = (value, None) if error is None else (None, _portable(error))
    if world_size() > 1:
        distributed.all_gather_object(gathered, sent)
    if error is not None:
        raise error
    first = next((found for _, found in gathered if found is not None), None)
    if first is not None:
        raise first
    return [found for found, _ in gathered]


def gather_to_zero(value: T) -> list[T] | None:
    """Return every rank's `value`, in the order of ranks, on rank 0, and None elsewhere."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] | None = [None] * world_size() if rank() == 0 else None
    distributed.gather_object(value, gathered, dst=0)
    return gathered


def from_zero(value: T) -> T:
    """Return rank 0's `value` on every rank."""
    if world_size() == 1:
        return value
    box: list[Any] = [value]
    distributed.broadcast_object_list(box, src=0)
    received: T = box[0]
    return received


def share_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0's `model`; running averages of batches differ by rank."""
    if distributed.is_initialized():
        with torch.no_grad():
            for buffer in model.buffers():
                shared = buffer.contiguous()
                distributed.broadcast(shared, src=0)
                if shared is not buffer and not torch.equal(shared, buffer):
                    buffer.copy_(shared)


def mean(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the mean of `tensor` over the ranks, summed in the order of ranks.

    An all-reduce would be cheaper for large tensors, but its order of summation depends on the size, so that
    a value logged in a batch of values would not be the same to the last bit as one logged alone.
    """
    if not distributed.is_initialized():
        return tensor.clone()
    own = tensor.detach().to(device).contiguous()
    parts = [torch.empty_like(own) for _ in range(world_size())]
    distributed.all_gather(parts, own)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return (total / len(parts)).to(tensor.device)


@contextmanager
def agreed() -> Iterator[None]:
    """Do the work inside on every rank; raise on every rank if any rank fails in it (see `gather`)."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    gather(None, error)


def _portable(error: Exception) -> SlurmddpError:
    """Return an error that other ranks can be sent, and that says where it happened."""
    where = f"Rank {rank()} on {socket.gethostname()}"
    if isinstance(error, SlurmddpError):
        return type(error)(f"{where}: {error.message}", hint=error.hint)
    return SlurmddpError(f"{where} failed with {type(error).__name__}: {error}.")
