"""Let the ranks of each node copy their shards of a state into the buffer of the node's first rank.

The first rank sends the place of its buffer, and the other ranks of the node write there. So no rank holds
the shards of another rank, and the checkpoint service of a node sees one state.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from slurmddp.checkpoint.files.parts import Parts
from slurmddp.checkpoint.state.mapped_tensor import MappedTensor
from slurmddp.checkpoint.state.safetensors_stream import layout
from slurmddp.checkpoint.state.staging import NoMemory
from slurmddp.checkpoint.state.state_tree import flatten
from slurmddp.checkpoint.state.writer import write_shards
from slurmddp.collectives import values as collectives
from slurmddp.errors import CheckpointError

_Place = tuple[int, int, dict[int, int]]
"""Process id and descriptor of a buffer, and by rank the offset of the rank's shards in the buffer."""


class ShardCopy:
    """One copy of a sharded state into the buffers of the nodes; a context manager on all ranks.

    Inside of the context, each rank calls one method. The first rank of a node calls `write` if it has a
    buffer. All other ranks call `decline`, which writes their shards into the buffer of their node's first
    rank. At its end the context calls `decline` for a rank that has called neither.

    Args:
        state: the state, with this rank's shards.
        parts: the files for the shards of ranks whose node has no buffer.
        node_rank: the number of this rank's node.
        everywhere: whether to copy only if all nodes have a buffer.
    """

    def __init__(
        self, state: Mapping[str, Any], parts: Parts, node_rank: int, *, everywhere: bool = False
    ) -> None:
        error: Exception | None = None
        size = 0
        try:
            self._head, self._tensors = layout(flatten(state, sharded=True).shards)
            size = len(self._head) + sum(tensor.nbytes for tensor in self._tensors)
        except Exception as caught:
            error = caught

        gathered = collectives.gather((node_rank, size), error)
        self.parts = parts
        self.ranks = len(gathered)
        self.sizes: Mapping[int, int] = {
            rank: size for rank, (node, size) in enumerate(gathered) if node == node_rank
        }
        self.first = min(self.sizes)
        """The first rank of this node."""
        self._state = state
        self._everywhere = everywhere
        self._nodes = len({node for node, _ in gathered})
        self._has_met = False

    @property
    def part(self) -> int | None:
        """The value for `StateBytes.part`: the first rank of this node, or None if there is one node only."""
        if len(self.sizes) == self.ranks:
            return None
        return self.first

    def write(self, descriptor: int, view: MappedTensor, starts: Mapping[int, int]) -> bool:
        """Offer a buffer, into which the ranks of this node write their shards.

        Args:
            descriptor: the descriptor of the buffer in this process.
            view: the buffer.
            starts: the offset for the shards of each rank of this node.

        Returns:
            Whether the shards are in the buffer.

        Raises:
            CheckpointError: on all ranks, if a rank can't write its shards.
        """
        return self._meet((os.getpid(), descriptor, dict(starts)), view)

    def decline(self) -> bool:
        """Offer no buffer; write this rank's shards into the buffer of its node's first rank, if any.

        Returns:
            Whether this rank's shards are in a buffer.
        """
        if self._has_met:
            raise CheckpointError(
                "A rank could not write its shards into memory.", hint="The log of that rank shows why."
            )
        return self._meet(None, None)

    def write_file(self) -> None:
        """Write this rank's shards to disk, into a file of the checkpoint that rank 0 publishes."""
        write_shards(self.parts, collectives.rank(), self._state)

    def __enter__(self) -> ShardCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_met:
            return

        # The other ranks wait in `_meet` for this rank. So send them its error, or decline if it has none.
        if isinstance(error, Exception) and not isinstance(error, NoMemory):
            collectives.gather(None, error)
        elif error is None or isinstance(error, NoMemory):
            self.decline()

    def _meet(self, place: _Place | None, view: MappedTensor | None) -> bool:
        """Learn which ranks offer buffers, and write this rank's shards into the buffer of its node.

        Args:
            place: the buffer that this rank offers, or None.
            view: the same buffer in this process, or None.

        Returns:
            Whether this rank's shards are in a buffer.
        """
        self._has_met = True
        places = collectives.gather(place)
        count = sum(offered is not None for offered in places)
        if count == 0 or (self._everywhere and count < self._nodes):
            return False

        on_node = places[self.first]
        with collectives.agreed():
            if on_node is not None and view is not None:
                self._write(view, on_node[2])
            elif on_node is not None:
                self._write_into(*on_node)
        return on_node is not None

    def _write_into(self, process: int, descriptor: int, starts: Mapping[int, int]) -> None:
        """Write this rank's shards into the buffer of another process on this node.

        Args:
            process: the process id.
            descriptor: the descriptor of the buffer in that process.
            starts: the offset for the shards of each rank of this node.
        """
        try:
            with Path(f"/proc/{process}/fd/{descriptor}").open("r+b", buffering=0) as memory:
                view = MappedTensor(mmap.mmap(memory.fileno(), 0))
        except OSError as error:
            raise CheckpointError(
                f"The shared memory of rank {self.first} can't be opened: {error.strerror}."
            ) from error

        # Don't pin this mapping: registering it with CUDA is not worth it for a single copy.
        view.is_pinned = False
        self._write(view, starts)
        view.close()

    def _write(self, view: MappedTensor, starts: Mapping[int, int]) -> None:
        start = starts[collectives.rank()]
        view.area[start : start + len(self._head)] = self._head
        view.copy(self._tensors, start + len(self._head))
