"""All-reduce on a ring: each rank sends to the next one only."""

from __future__ import annotations

import torch

from slurmddp.collectives.chunks import chunks
from slurmddp.collectives.link import Link


def ring(flat: torch.Tensor, link: Link) -> None:
    """Replace `flat` by its sum over all ranks; all ranks end with equal bits.

    A chunk travels once around the ring, and each rank adds its part. The sums travel around once more. Each
    rank sends 2(N-1) messages and 2(N-1)/N of the tensor, which is the least possible.

    Args:
        flat: contiguous, of one dimension, of equal length and dtype on all ranks.
        link: of this rank.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2),
        2009.
    """
    rank, size = link.rank, link.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    parts = chunks(flat, size)
    received = torch.empty_like(max(parts, key=len))
    for step in range(size - 1):
        done = link.send(parts[(rank - step) % size], after)
        own = parts[(rank - step - 1) % size]
        link.recv(received[: len(own)], before)
        own += received[: len(own)]
        done()
    for step in range(size - 1):
        done = link.send(parts[(rank + 1 - step) % size], after)
        link.recv(parts[(rank - step) % size], before)
        done()
