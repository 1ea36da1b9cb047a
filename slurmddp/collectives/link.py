"""Define the smallest transport on which every collective runs: sends and receives of whole tensors.

A user's transport is a class with the members of `Link`. `GroupLink` sends over a process group of torch.
`ThreadLink` sends between threads of one process. `CountedLink` counts the messages of another link.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import distributed


@runtime_checkable
class Link(Protocol):
    """The interface of a rank's connections to all other ranks.

    Messages between two ranks keep their order.
    """

    rank: int
    world_size: int

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        """Start to send a contiguous tensor to rank `to`.

        Returns:
            A function that waits until the memory of the tensor may be changed.
        """

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Wait for the next message of rank `source`, and copy it into `tensor`.

        The tensor is contiguous and has the shape and dtype of the sent tensor.
        """


def copied_devices(group: distributed.ProcessGroup | None = None) -> set[str]:
    """Return the types of devices whose tensors a group can't send directly.

    gloo sends only from CPU memory (torch 2.13).
    """
    return {"cuda"} if "cuda:gloo" in distributed.get_backend_config(group) else set()


class GroupLink:
    """A link that sends messages over a process group of torch.

    gloo sends only from CPU memory (torch 2.13), so for gloo tensors on GPUs are copied to the CPU and back.

    Args:
        group: the process group; None means the default group.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = distributed.get_rank(group)
        self.world_size = distributed.get_world_size(group)
        self._global_ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        self._copied_devices = copied_devices(group)
        """Types of devices whose tensors are copied to the CPU to be sent."""

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        if tensor.device.type in self._copied_devices:
            tensor = tensor.cpu()

        work = distributed.isend(tensor, self._global_ranks[to], self._group)
        return (lambda: None) if work is None else work.wait

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.device.type in self._copied_devices:
            message = torch.empty_like(tensor, device="cpu")
            distributed.recv(message, self._global_ranks[source], self._group)
            tensor.copy_(message)
            return

        distributed.recv(tensor, self._global_ranks[source], self._group)


class ThreadLink:
    """A link between threads of one process, each of which is a rank; for tests and experiments.

    Args:
        rank: the rank of this thread.
        boxes: the queue of each pair of ranks, `boxes[source][to]`; all threads share them (`of_threads`).
    """

    def __init__(self, rank: int, boxes: Sequence[Sequence[queue.SimpleQueue[torch.Tensor]]]) -> None:
        self.rank = rank
        self.world_size = len(boxes)
        self._boxes = boxes

    @classmethod
    def of_threads(cls, count: int) -> list[ThreadLink]:
        """Return the connected links of `count` threads, by rank."""
        boxes = [[queue.SimpleQueue[torch.Tensor]() for _ in range(count)] for _ in range(count)]
        return [cls(rank, boxes) for rank in range(count)]

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        self._boxes[self.rank][to].put(tensor.clone())
        return lambda: None

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._boxes[source][self.rank].get(timeout=60))


class CountedLink:
    """A link that counts the messages and bytes that this rank sends over another link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rank = link.rank
        self.world_size = link.world_size
        self.messages = 0
        """Messages that this rank has sent."""
        self.bytes = 0
        """Bytes that this rank has sent."""

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        self.messages += 1
        self.bytes += tensor.numel() * tensor.element_size()
        return self._link.send(tensor, to)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self._link.recv(tensor, source)
