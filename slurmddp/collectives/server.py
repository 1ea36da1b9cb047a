"""All-reduce through servers: rank 0 adds up everything, or each rank adds up one chunk."""

from __future__ import annotations

import torch

from slurmddp.collectives.chunks import chunks
from slurmddp.collectives.link import Link


def central_server(flat: torch.Tensor, link: Link) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    Rank 0 receives all tensors, adds them in the order of ranks, and sends the sum to all: (N-1) times the
    tensor in each direction, through one rank.

    Args:
        flat: contiguous, of equal length and dtype on all ranks.
        link: of this rank.
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
    for done in [link.send(flat, rank) for rank in others]:
        done()


def sharded_server(flat: torch.Tensor, link: Link) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    Rank i is the server of chunk i. Each rank sends 2(N-1) messages and 2(N-1)/N of the tensor in two steps,
    but every rank talks to every other.

    Args:
        flat: contiguous, of one dimension, of equal length and dtype on all ranks.
        link: of this rank.
    """
    parts, own = chunks(flat, link.world_size), link.rank
    others = [(own + step) % link.world_size for step in range(1, link.world_size)]
    sends = [link.send(parts[rank], rank) for rank in others]
    shares = {rank: torch.empty_like(parts[own]) for rank in others}
    for rank in others:
        link.recv(shares[rank], rank)
    for done in sends:
        done()
    shares[own] = parts[own].clone()
    parts[own].zero_()
    for rank in range(link.world_size):  # In the order of ranks, so that a repetition has equal bits.
        parts[own].add_(shares[rank])
    sends = [link.send(parts[own], rank) for rank in others]
    for rank in others:
        link.recv(parts[rank], rank)
    for done in sends:
        done()
