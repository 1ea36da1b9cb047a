"""Train data-parallel, with gradients averaged by an algorithm of slurmddp.collectives.

DistributedDataParallel calls the hook for each bucket of gradients as soon as it is full, and continues the
backward pass. Meanwhile a thread averages the buckets in their order.

This module has no `from __future__ import annotations`, because torch compares the hook's annotation with the
class GradBucket.
"""

import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from slurmddp.collectives import ALGORITHMS, all_reduce
from slurmddp.collectives.link import GroupLink, Link
from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.strategies.ddp import Ddp
from slurmddp.strategies.replicas import collective_timeout, refuse_sparse
from slurmddp.transports.operation_queue import Operation, OperationQueue

Averaged = torch.futures.Future[torch.Tensor]


def ddp_hook(algorithm: str = "ring") -> Callable[[Link, GradBucket], Averaged]:
    """Return a communication hook for DistributedDataParallel that averages gradients over a link.

    Register it with the link of this rank as its state. A thread of the hook sends and receives, so nothing
    else may use the link's group. On GPUs the hook works in the stream of the backward pass instead.

    Args:
        algorithm: a name of `slurmddp.collectives.ALGORITHMS`.

    Raises:
        ConfigError: there is no such algorithm.

    Example:
        model.register_comm_hook(GroupLink(distributed.new_group()), ddp_hook("tree"))
    """
    _check(algorithm)
    queue = OperationQueue()

    def average(link: Link, bucket: GradBucket) -> Averaged:
        buffer = bucket.buffer()

        def run() -> None:
            buffer.copy_(all_reduce(buffer, link, algorithm=algorithm, mean=True))

        label = f"{algorithm} all-reduce of bucket {bucket.index()} on rank {link.rank}"
        operation = Operation(label, run, [buffer], timedelta(minutes=30))
        if buffer.is_cuda:
            operation.run()
        else:
            queue.put(operation)

        return operation.get_future().then(lambda done: done.value()[0])

    # End the thread when the hook is deleted, at the latest before the interpreter ends.
    weakref.finalize(average, queue.end)
    return average


def _check(algorithm: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"strategy.algorithm is {algorithm!r}.", hint=near_matches(algorithm, ALGORITHMS))


class Ring(Ddp):
    """Strategy that averages gradients by an all-reduce of slurmddp.collectives, during the backward pass.

    Args:
        algorithm: a name of `slurmddp.collectives.ALGORITHMS`: "ring", "halving_doubling", "tree",
            "central_server", "sharded_server" or "all_gather".
        find_unused_parameters: whether some parameters get no gradient in some steps.
        bucket_mb: size of a bucket in MB; None: torch's default.

    Raises:
        ConfigError: there is no such algorithm, or `bucket_mb` is not above 0.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009.
    """

    def __init__(
        self,
        *,
        algorithm: str = "ring",
        find_unused_parameters: bool | None = False,
        bucket_mb: float | None = None,
    ) -> None:
        super().__init__(find_unused_parameters=find_unused_parameters, bucket_mb=bucket_mb)
        _check(algorithm)
        self._algorithm = algorithm
        self._average: Callable[[Link, GradBucket], Averaged] | None = None
        """The hook of all models; None before the first `wrap`, because a hook's queue can't be pickled."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if distributed.is_initialized():
            refuse_sparse(model, "strategy=ring")

        wrapped = super().wrap(model, device)
        if isinstance(wrapped, DistributedDataParallel):
            if self._average is None:
                self._average = ddp_hook(self._algorithm)

            # Use a separate group, because the program's collectives may run at the same time as the thread's
            # messages.
            group = distributed.new_group(timeout=collective_timeout())
            wrapped.register_comm_hook(GroupLink(group), self._average)

        return wrapped
