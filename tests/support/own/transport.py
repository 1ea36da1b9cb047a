"""A user's transports: a transport over messages of gloo, and transports that can't work."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed


class Messages:
    """A transport with the smallest interface: it sends and receives by gloo."""

    def __init__(self, store: distributed.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._gloo = distributed.ProcessGroupGloo(store, rank, world_size, timeout)
        self.rank = rank
        self.world_size = world_size

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        return self._gloo.send([tensor], to, 0).wait

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self._gloo.recv([tensor], source, 0).wait()


class Deaf(Messages):
    recv = None  # type: ignore[assignment]


class Unbuildable(Messages):
    def __init__(self, *arguments: object) -> None:
        raise OSError("no such fabric")


class HalfGroup(distributed.ProcessGroup):
    def allreduce(self, *arguments: object) -> None:
        """Do nothing: the only operation of a process group that lacks all others."""


not_a_class = 3
