"""All-reduce by an all-gather: each rank gets all tensors, and adds them up itself."""

from __future__ import annotations

import torch

from slurmddp.collectives.link import Link
from slurmddp.collectives.operations import all_gather


def all_gather_sum(flat: torch.Tensor, link: Link) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    Each rank sends N-1 times the tensor, holds N of them, and adds N-1 of them. Use it to see the worth of
    the other algorithms.

    Args:
        flat: contiguous, of equal length and dtype on all ranks.
        link: of this rank.
    """
    gathered = [torch.empty_like(flat) for _ in range(link.world_size)]
    gathered[link.rank].copy_(flat)
    all_gather(gathered, link)
    flat.copy_(gathered[0])
    for other in gathered[1:]:  # In the order of ranks, so that all ranks have equal bits.
        flat += other
