"""Lets the ranks of a node copy their shards of a state into the buffer of rank 0, each its own part.

Rank 0 sends the place of its buffer, and the other ranks write there. So no rank holds the state of another,
and the checkpoint service sees one state, as of replicas.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from slurmddp.checkpoint.state.safetensors_stream import layout
from slurmddp.checkpoint.state.shards import with_whole_tensors
from slurmddp.checkpoint.state.staging import MappedTensor
from slurmddp.checkpoint.state.state_tree import flatten
from slurmddp.errors import CheckpointError
from slurmddp.training.process_group import collectives

_WHOLE = "whole"


class ShardCopy:
    """One copy of a sharded state. All ranks build it.

    Rank 0 then calls `write` or `gather`, or neither, inside of the context; the other ranks call `follow`.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        error: Exception | None = None
        size = 0
        try:
            self._head, self._tensors = layout(flatten(state, sharded=True).shards)
            size = len(self._head) + sum(tensor.nbytes for tensor in self._tensors)
        except Exception as caught:
            error = caught
        self.sizes: Sequence[int] = collectives.gather(size, error)
        self._has_answered = False

    def write(self, descriptor: int, view: MappedTensor, starts: Sequence[int]) -> None:
        """Let all ranks write their shards (see `ShardWriters`); raises on all ranks if one fails."""
        self._answer([os.getpid(), descriptor, list(starts)])
        with collectives.agreed():
            self._write(view, starts[0])

    def gather(self, state: Any) -> Any:
        """Return the state with whole tensors, to which all ranks send their shards."""
        if self._has_answered:
            raise CheckpointError("A rank could not write its shards into memory.")
        self._answer(_WHOLE)
        return with_whole_tensors(state, keep=True)

    def follow(self, state: Any) -> None:
        """Do what rank 0 does, on another rank."""
        place = collectives.from_zero(None)
        if place == _WHOLE:
            with_whole_tensors(state, keep=False)
        elif place is not None:
            with collectives.agreed():
                self._write_into(*place)

    def __enter__(self) -> ShardCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if collectives.rank() == 0 and not self._has_answered:
            self._answer(None)

    def _answer(self, answer: Any) -> None:
        self._has_answered = True
        collectives.from_zero(answer)

    def _write_into(self, process: int, descriptor: int, starts: Sequence[int]) -> None:
        try:
            with Path(f"/proc/{process}/fd/{descriptor}").open("r+b", buffering=0) as memory:
                view = MappedTensor(mmap.mmap(memory.fileno(), 0))
        except OSError as error:
            raise CheckpointError(f"The memory of rank 0 can't be opened: {error.strerror}.") from error
        view.is_pinned = False  # The map is too short-lived to be registered with CUDA.
        self._write(view, starts[collectives.rank()])
        view.close()

    def _write(self, view: MappedTensor, start: int) -> None:
        view.area[start : start + len(self._head)] = self._head
        view.copy(self._tensors, start + len(self._head))
