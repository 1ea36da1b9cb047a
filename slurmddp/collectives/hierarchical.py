"""All-reduce in two levels: within each node over one link, and between the nodes over another link."""

from __future__ import annotations

import torch

from slurmddp.collectives.chunks import chunks
from slurmddp.collectives.link import Link
from slurmddp.collectives.operations import Combine, all_gather, reduce_scatter
from slurmddp.collectives.ring import ring


def hierarchical(
    flat: torch.Tensor, local: Link, between: Link, combine: Combine = torch.Tensor.add_
) -> None:
    """Replace `flat` by its sum over all ranks of all nodes; all ranks end with equal bits.

    The tensor is cut into one share per rank of a node. Each rank reduces its share over its node, then over
    all nodes on a ring, and the node gathers the shares. On M nodes of L ranks, a rank sends 2(M-1)/M of its
    share, which is 1/L of the tensor, to another node.

    Args:
        flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
        local: connects the ranks of this node, such as a `SharedMemoryLink`. All nodes have equally many
            ranks.
        between: connects the ranks of all nodes that have the same rank in `local`.
        combine: reduces its second argument into the first; by default a sum.

    Example:
        hierarchical(gradient, SharedMemoryLink(store, local_rank, 8, timeout), GroupLink(across_nodes))
    """
    shares = chunks(flat, local.world_size)
    reduce_scatter(shares, local, combine)
    ring(shares[local.rank], between, combine)
    all_gather(shares, local)
