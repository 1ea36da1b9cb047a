"""Provide all-reduce algorithms in plain Python, whose messages and speed can be compared.

Each algorithm needs only the sends and receives of a `Link`.

link = GroupLink()
mean = all_reduce(gradient, link, algorithm="ring", mean=True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from slurmddp.collectives.all_gather import all_gather_sum
from slurmddp.collectives.halving_doubling import halving_doubling
from slurmddp.collectives.link import CountedLink, GroupLink, Link, ThreadLink
from slurmddp.collectives.ring import ring
from slurmddp.collectives.server import central_server, sharded_server
from slurmddp.collectives.tree import tree
from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches

Algorithm = Callable[[torch.Tensor, Link], None]

ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "tree": tree,
    "central_server": central_server,
    "sharded_server": sharded_server,
    "all_gather": all_gather_sum,
}
"""By name, the functions that replace a contiguous tensor of one dimension by its sum over all ranks."""


def all_reduce(
    tensor: torch.Tensor, link: Link, *, algorithm: str = "ring", mean: bool = False
) -> torch.Tensor:
    """Return the sum or mean of a tensor over all ranks; all ranks must call this function.

    Args:
        tensor: a tensor of any shape, with the same shape and dtype on all ranks. It does not change.
        link: the connection of this rank to the other ranks.
        algorithm: a key of `ALGORITHMS`.
        mean: whether to divide the sum by the number of ranks.

    Returns:
        A new tensor of the same shape, dtype and device, with equal bits on all ranks.

    Raises:
        ConfigError: there is no such algorithm, or `mean` is True for a tensor of integers.

    Example:
        total = all_reduce(torch.ones(3), GroupLink(), algorithm="tree")
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"There is no algorithm {algorithm!r}.", hint=near_matches(algorithm, ALGORITHMS))

    if mean and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"The mean of {str(tensor.dtype).removeprefix('torch.')} values may not be a whole number.",
            hint="Convert the tensor to a floating point type, or take the sum.",
        )

    flat = tensor.detach().reshape(-1).clone()
    if link.world_size > 1 and flat.numel():
        ALGORITHMS[algorithm](flat, link)

    if mean:
        flat = flat / link.world_size
    return flat.reshape(tensor.shape)


__all__ = ["ALGORITHMS", "Algorithm", "CountedLink", "GroupLink", "Link", "ThreadLink", "all_reduce"]
