"""All-reduce on a binomial tree: a reduction to rank 0, then a broadcast."""

from __future__ import annotations

import torch

from slurmddp.collectives.link import Link


def tree(flat: torch.Tensor, link: Link) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    The tensors are added up a binomial tree to rank 0, and the sum is sent down the tree. This takes
    2 ceil(log2 N) steps with the whole tensor in each: few messages, but many bytes.

    Args:
        flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
        link: the link of this rank.

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
    """
    rank = link.rank
    size = link.world_size
    received = torch.empty_like(flat)

    distance = 1
    while distance < size and rank % (2 * distance) == 0:
        if rank + distance < size:
            link.recv(received, rank + distance)
            flat += received
        distance *= 2

    # `distance` is now the distance to this rank's parent, because the loop ended there.
    if rank != 0:
        link.send(flat, rank - distance)()
        link.recv(flat, rank - distance)

    while distance > 1:
        distance //= 2
        if rank + distance < size:
            link.send(flat, rank + distance)()
