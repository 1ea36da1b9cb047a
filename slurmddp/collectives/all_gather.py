"""All-reduce by an all-gather: each rank gets all tensors, and adds them up itself."""

from __future__ import annotations

import torch

from slurmddp.collectives.link import Link
from slurmddp.collectives.operations import all_gather


def all_gather_sum(flat: torch.Tensor, link: Link) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    Each of N ranks sends the tensor N-1 times, holds N tensors, and adds N-1 of them. It is the baseline of
    the other algorithms.

    Args:
        flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
        link: the link of this rank.
    """
    gathered = [torch.empty_like(flat) for _ in range(link.world_size)]
    gathered[link.rank].copy_(flat)
    all_gather(gathered, link)

    # Every rank adds in the order of ranks: rounding depends on the order, and all ranks must get equal bits.
    flat.copy_(gathered[0])
    for other in gathered[1:]:
        flat += other
