"""All-reduce through servers: rank 0 adds up whole tensors, or each rank adds up one chunk."""

from __future__ import annotations

import torch

from slurmddp.collectives.chunks import chunks
from slurmddp.collectives.link import Link


def central_server(flat: torch.Tensor, link: Link) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    Rank 0 receives all tensors, adds them in the order of ranks, and sends the sum to all ranks. Through rank
    0's link, N-1 tensors travel in each direction.

    Args:
        flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
        link: the link of this rank.
    """
    if link.rank:
        link.send(flat, 0)()
        link.recv(flat, 0)
        return

    received = torch.empty_like(flat)
    others = range(1, link.world_size)
    for rank in others:
        link.recv(received, rank)
        flat += received

    sends = [link.send(flat, rank) for rank in others]
    for done in sends:
        done()


def sharded_server(flat: torch.Tensor, link: Link) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    Rank i is the server of chunk i. Each of N ranks sends 2(N-1) messages, together 2(N-1)/N of the tensor's
    bytes. It takes two steps, in which every rank sends to every other rank.

    Args:
        flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
        link: the link of this rank.
    """
    parts = chunks(flat, link.world_size)
    part = parts[link.rank]
    others = [(link.rank + step) % link.world_size for step in range(1, link.world_size)]

    sends = [link.send(parts[rank], rank) for rank in others]
    shares = {rank: torch.empty_like(part) for rank in others}
    for rank in others:
        link.recv(shares[rank], rank)
    for done in sends:
        done()

    # Add in the order of ranks, not of arrival: rounding depends on the order, and a repetition must have
    # equal bits.
    shares[link.rank] = part.clone()
    part.zero_()
    for rank in range(link.world_size):
        part.add_(shares[rank])

    sends = [link.send(part, rank) for rank in others]
    for rank in others:
        link.recv(parts[rank], rank)
    for done in sends:
        done()
