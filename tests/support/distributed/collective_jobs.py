"""Jobs of ranks that call the all-reduce algorithms."""

from __future__ import annotations

import torch

from slurmddp.collectives import ALGORITHMS, GroupLink, all_reduce
from slurmddp.training.distributon import Distributon


def sums() -> dict[str, list[list[float]]]:
    """Return the sums of all algorithms, of tensors of one, two and seven elements."""
    with Distributon() as d:
        d.launch()
        link = GroupLink()
        tensors = [torch.full((length,), float(value)) for length, value in ((1, 1), (2, 2), (7, 3))]
        return {
            name: [all_reduce(tensor, link, algorithm=name).tolist() for tensor in tensors]
            for name in ALGORITHMS
        }
