"""Build collectives other than all-reduce from the sends and receives of a link.

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
    rank = link.rank
    size = link.world_size
    place = (rank - source) % size
    # Find the distance to the parent in the tree, which is the lowest set bit of `place`. For the root the
    # loop ends at `size` or more.
    distance = 1
    while distance < size and not place & distance:
        distance *= 2

    if place:
        link.recv(flat, (rank - distance) % size)

    sends = []
    while distance > 1:
        distance //= 2
        if place + distance < size:
            sends.append(link.send(flat, (rank + distance) % size))

    for done in sends:
        done()


def reduce(flat: torch.Tensor, link: Link, target: int, combine: Combine) -> None:
    """Reduce `flat` of all ranks into `flat` of rank `target`, on a binomial tree.

    The tensors of the other ranks do not change. `combine` reduces its second argument into the first.
    """
    rank = link.rank
    size = link.world_size
    place = (rank - target) % size
    total = flat.clone() if place else flat
    received = torch.empty_like(flat)

    distance = 1
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
        parts: a tensor for each rank; this rank fills its part before the call.
        link: the link of this rank.
    """
    rank = link.rank
    size = link.world_size
    for step in range(size - 1):
        done = link.send(parts[(rank - step) % size], (rank + 1) % size)
        link.recv(parts[(rank - step - 1) % size], (rank - 1) % size)
        done()


def reduce_scatter(parts: Sequence[torch.Tensor], link: Link, combine: Combine) -> None:
    """Reduce `parts[i]` of all ranks into `parts[i]` of rank i, on a ring.

    Args:
        parts: a tensor for each rank. Afterwards this rank's part is reduced, and its other parts hold
            partial results.
        link: the link of this rank.
        combine: reduces its second argument into the first.
    """
    rank = link.rank
    size = link.world_size
    received = torch.empty_like(max(parts, key=len))

    for step in range(size - 1):
        done = link.send(parts[(rank - step - 1) % size], (rank + 1) % size)
        part = parts[(rank - step - 2) % size]
        link.recv(received[: len(part)], (rank - 1) % size)
        combine(part, received[: len(part)])
        done()


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], link: Link) -> None:
    """Send `inputs[i]` to each rank i, and receive into `outputs[i]` what rank i sends to this rank."""
    rank = link.rank
    size = link.world_size
    outputs[rank].copy_(inputs[rank])

    for step in range(1, size):
        target = (rank + step) % size
        source = (rank - step) % size
        done = link.send(inputs[target], target)
        link.recv(outputs[source], source)
        done()


def gather(parts: Sequence[torch.Tensor], part: torch.Tensor, link: Link, target: int) -> None:
    """Fill `parts[i]` of rank `target` with `part` of each rank i; on other ranks `parts` is ignored."""
    if link.rank != target:
        link.send(part, target)()
        return

    parts[target].copy_(part)
    for rank in range(link.world_size):
        if rank != target:
            link.recv(parts[rank], rank)


def scatter(part: torch.Tensor, parts: Sequence[torch.Tensor], link: Link, source: int) -> None:
    """Fill `part` of each rank i with `parts[i]` of rank `source`; on other ranks `parts` is ignored."""
    if link.rank != source:
        link.recv(part, source)
        return

    part.copy_(parts[source])
    sends = [link.send(parts[rank], rank) for rank in range(link.world_size) if rank != source]
    for done in sends:
        done()


def barrier(link: Link) -> None:
    """Wait until all ranks have called this function; each rank sends ceil(log2 N) messages of one byte.

    Source:
        Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988 (dissemination).
    """
    rank = link.rank
    size = link.world_size
    token = torch.zeros(1, dtype=torch.uint8)
    received = token.clone()

    distance = 1
    while distance < size:
        done = link.send(token, (rank + distance) % size)
        link.recv(received, (rank - distance) % size)
        done()
        distance *= 2
