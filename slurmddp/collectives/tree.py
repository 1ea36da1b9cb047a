"""All-reduce on a binomial tree: a reduction to rank 0, then a broadcast."""

from __future__ import annotations

import torch

from slurmddp.collectives.link import Link


def tree(flat: torch.Tensor, link: Link) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    2 ceil(log2 N) steps, so few messages in a row. But the whole tensor is sent in each of them.

    Args:
        flat: contiguous, of equal length and dtype on all ranks.
        link: of this rank.

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
    """
    rank, size = link.rank, link.world_size
    received = torch.empty_like(flat)
    distance = 1
    while distance < size and rank % (2 * distance) == 0:
        if rank + distance < size:
            link.recv(received, rank + distance)
            flat += received
        distance *= 2
    if rank != 0:  # Here the distance is that to the parent of this rank.
        link.send(flat, rank - distance)()
        link.recv(flat, rank - distance)
    while distance > 1:
        distance //= 2
        if rank + distance < size:
            link.send(flat, rank + distance)()
