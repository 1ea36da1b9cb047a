"""Collectives other than all-reduce, built from the sends and receives of a link.

All tensors are contiguous, of one dimension, and of equal dtype on all ranks. All ranks call the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slurmddp.collectives.link import Link

Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""Reduces its second argument into the first, elementwise: `torch.Tensor.add_` for a sum."""


def broadcast(flat: torch.Tensor, link: Link, source: int) -> None:
    """Fill `flat` with the tensor of rank `source`, on a binomial tree in ceil(log2 N) steps."""
    rank, size = link.rank, link.world_size
    place, distance = (rank - source) % size, 1
    while distance < size and not place & distance:
        distance *= 2
    if place:
        link.recv(flat, (rank - distance) % size)
    sent = []
    while distance > 1:
        distance //= 2
        if place + distance < size:
            sent.append(link.send(flat, (rank + distance) % size))
    for done in sent:
        done()


def reduce(flat: torch.Tensor, link: Link, target: int, combine: Combine) -> None:
    """Reduce into `flat` of rank `target`, on a binomial tree; the other ranks' tensors don't change."""
    rank, size = link.rank, link.world_size
    place, distance = (rank - target) % size, 1
    total, received = flat.clone() if place else flat, torch.empty_like(flat)
    while distance < size and not place & distance:
        if place + distance < size:
            link.recv(received, (rank + distance) % size)
            combine(total, received)
        distance *= 2
    if place:
        link.send(total, (rank - distance) % size)()


def all_gather(parts: Sequence[torch.Tensor], link: Link) -> None:
    """Copy `parts[i]` of each rank i to all ranks, on a ring.

    Args:
        parts: a tensor for each rank; this rank fills its own part before the call.
        link: of this rank.
    """
    rank, size = link.rank, link.world_size
    for step in range(size - 1):
        done = link.send(parts[(rank - step) % size], (rank + 1) % size)
        link.recv(parts[(rank - step - 1) % size], (rank - 1) % size)
        done()


def reduce_scatter(parts: Sequence[torch.Tensor], link: Link, combine: Combine) -> None:
    """Reduce `parts[i]` of all ranks into `parts[i]` of rank i, on a ring.

    Args:
        parts: a tensor for each rank. Afterwards this rank's own part is reduced, and its other parts hold
            partial results.
        link: of this rank.
        combine: reduces its second argument into the first.
    """
    rank, size = link.rank, link.world_size
    received = torch.empty_like(max(parts, key=len))
    for step in range(size - 1):
        done = link.send(parts[(rank - step - 1) % size], (rank + 1) % size)
        own = parts[(rank - step - 2) % size]
        link.recv(received[: len(own)], (rank - 1) % size)
        combine(own, received[: len(own)])
        done()


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], link: Link) -> None:
    """Send `inputs[i]` to rank i, and fill `outputs[i]` with what rank i sends."""
    rank, size = link.rank, link.world_size
    outputs[rank].copy_(inputs[rank])
    for step in range(1, size):
        after, before = (rank + step) % size, (rank - step) % size
        done = link.send(inputs[after], after)
        link.recv(outputs[before], before)
        done()


def gather(parts: Sequence[torch.Tensor], own: torch.Tensor, link: Link, target: int) -> None:
    """Fill each `parts[i]` of rank `target` with `own` of rank i; other ranks pass no parts."""
    if link.rank != target:
        link.send(own, target)()
        return
    parts[target].copy_(own)
    for rank in range(link.world_size):
        if rank != target:
            link.recv(parts[rank], rank)


def scatter(own: torch.Tensor, parts: Sequence[torch.Tensor], link: Link, source: int) -> None:
    """Fill `own` of rank i with `parts[i]` of rank `source`; other ranks pass no parts."""
    if link.rank != source:
        link.recv(own, source)
        return
    own.copy_(parts[source])
    for done in [link.send(parts[rank], rank) for rank in range(link.world_size) if rank != source]:
        done()


def barrier(link: Link) -> None:
    """Return once all ranks have called it, after ceil(log2 N) messages of one byte from each rank.

    Source:
        Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988 (dissemination).
    """
    rank, size = link.rank, link.world_size
    token, distance = torch.zeros(1, dtype=torch.uint8), 1
    received = token.clone()
    while distance < size:
        done = link.send(token, (rank + distance) % size)
        link.recv(received, (rank - distance) % size)
        done()
        distance *= 2
