"""Let DistributedDataParallel average its gradients by an algorithm of this room.

Because torch compares the hook's annotation with GradBucket, the module has no `from __future__ import
annotations`.
"""

from collections.abc import Callable

import torch
from torch.distributed import GradBucket

from slurmddp.collectives import all_reduce
from slurmddp.collectives.link import Link


def ddp_hook(algorithm: str = "ring") -> Callable[[Link, GradBucket], torch.futures.Future[torch.Tensor]]:
    """Return a communication hook for DistributedDataParallel, whose state is the link of this rank.

    The backward pass waits for each bucket, so communication and computation don't overlap.

    Args:
        algorithm: a name of `ALGORITHMS`.

    Example:
        model.register_comm_hook(GroupLink(), ddp_hook("tree"))
    """

    def average(link: Link, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(all_reduce(bucket.buffer(), link, algorithm=algorithm, mean=True))
        return future

    return average
