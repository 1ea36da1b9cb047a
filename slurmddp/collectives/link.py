"""The smallest transport on which every collective runs: sends and receives of whole tensors.

A user's transport is a class with the members of `Link`. `GroupLink` sends over a process group of
torch, `ThreadLink` between threads of one process, `CountedLink` counts what another link sends.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import distributed


@runtime_checkable
class Link(Protocol):
    """The connections of one rank with all others. Messages between two ranks keep their order."""

    rank: int
    world_size: int

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        """Start to send a contiguous tensor; return a function that waits until its memory may change."""

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a contiguous tensor, of the sent shape and dtype, with the next message of `source`."""


class GroupLink:
    """Messages over a process group of torch, such as gloo's.

    Args:
        group: the group; None: the default group.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.world_size = distributed.get_rank(group), distributed.get_world_size(group)
        self._global = distributed.get_process_group_ranks(group or distributed.group.WORLD)

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        work = distributed.isend(tensor, self._global[to], self._group)
        return (lambda: None) if work is None else work.wait

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        distributed.recv(tensor, self._global[source], self._group)


class ThreadLink:
    """Messages between threads of one process: a rank is a thread. For tests, and to try an algorithm.

    Args:
        rank: the number of this thread.
        boxes: a queue for each pair, `boxes[source][to]`, shared by all threads (see `of_threads`).
    """

    def __init__(self, rank: int, boxes: Sequence[Sequence[queue.SimpleQueue[torch.Tensor]]]) -> None:
        self.rank, self.world_size, self._boxes = rank, len(boxes), boxes

    @classmethod
    def of_threads(cls, count: int) -> list[ThreadLink]:
        """Return the links of `count` threads."""
        boxes = [[queue.SimpleQueue[torch.Tensor]() for _ in range(count)] for _ in range(count)]
        return [cls(rank, boxes) for rank in range(count)]

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        self._boxes[self.rank][to].put(tensor.clone())
        return lambda: None

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._boxes[source][self.rank].get(timeout=60))


class CountedLink:
    """Counts the messages and bytes that a rank sends over another link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rank, self.world_size = link.rank, link.world_size
        self.messages = self.bytes = 0
        """Messages and bytes that this rank has sent."""

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        self.messages += 1
        self.bytes += tensor.numel() * tensor.element_size()
        return self._link.send(tensor, to)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self._link.recv(tensor, source)
