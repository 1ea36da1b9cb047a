"""All-reduce on a ring: each rank sends to the next rank only."""

from __future__ import annotations

import torch

from slurmddp.collectives.chunks import chunks
from slurmddp.collectives.link import Link
from slurmddp.collectives.operations import Combine, all_gather, reduce_scatter


def ring(flat: torch.Tensor, link: Link, combine: Combine = torch.Tensor.add_) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    Each chunk travels once around the ring, and each rank adds its values. Then the sums travel around once
    more. Each of N ranks sends 2(N-1) messages, together 2(N-1)/N of the tensor's bytes. No algorithm can
    send fewer bytes.

    Args:
        flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
        link: the link of this rank.
        combine: reduces its second argument into the first; by default a sum.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2),
        2009.
    """
    parts = chunks(flat, link.world_size)
    reduce_scatter(parts, link, combine)
    all_gather(parts, link)
