"""Copy the training states of a rank into memory that outlives the rank, and read them: staging buffers.

Two memory files take turns, so that one committed state exists during the next copy. The files and their
pages stay allocated, so that a copy costs no allocation.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from slurmddp.checkpoint.files.manifest import TENSORS_FILE, check_format, shard_file
from slurmddp.checkpoint.files.publish import check, versions
from slurmddp.checkpoint.files.space import size_text
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.state.mapped_tensor import MappedTensor
from slurmddp.checkpoint.state.reader import Checkpoint
from slurmddp.checkpoint.state.safetensors_stream import Bytes, decode, layout
from slurmddp.checkpoint.state.shards import joined
from slurmddp.checkpoint.state.state_tree import flatten, unflatten
from slurmddp.errors import CheckpointError
from slurmddp.host.cgroups import available_bytes, copies_that_fit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

_ROUND_BYTES = 2 << 20
"""Sizes are rounded up to multiples of this, so that a slightly longer tree needs no new map."""

_LARGEST_GROWTH = 8
"""A growing state gets at most 1 / _LARGEST_GROWTH of its size in advance."""


class NoMemory(Exception):
    """The memory is too small for a copy; the text holds the wanted and the available size."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a training after a step, to be copied or written."""

    root: Path
    """The folder of the checkpoints to which the state belongs."""
    step: int
    stamp: int
    """Nanoseconds since the epoch, the same for the copies of all nodes."""
    state: Mapping[str, Any]
    meta: Mapping[str, Any]
    """`state` and `meta` are as in `checkpoint.write`."""


class ShardWriters(Protocol):
    """The ranks of a sharded state, which write into the buffer of the first rank of their node."""

    ranks: int
    """Number of ranks of all nodes."""
    sizes: Mapping[int, int]
    """Bytes of the file of each rank of this node."""

    def write(self, descriptor: int, view: MappedTensor, starts: Mapping[int, int]) -> bool:
        """Let each rank write its file into the memory file `descriptor`, at its place in `starts`.

        Return False if another node makes no copy, so that nobody needs this copy.
        """


@dataclass
class _Slot:
    """One memory file and its map, once it is mapped."""

    descriptor: int
    view: MappedTensor | None = None

    @property
    def capacity(self) -> int:
        return 0 if self.view is None else len(self.view.area)


class StagingBuffers:
    """The memory files of one rank.

    Args:
        inherited: descriptors of files from the agent, in the order of their numbers.
        register: called with number and descriptor of each new file.
    """

    def __init__(
        self,
        inherited: Sequence[int] = (),
        register: Callable[[int, int], None] = lambda slot, descriptor: None,
    ) -> None:
        self._slots = [_Slot(descriptor) for descriptor in inherited]
        self._register = register
        self._wanted = 2
        self._preparing: threading.Thread | None = None
        self._refused: NoMemory | None = None
        self._outgrown = 0
        """Size in bytes of the last state that was skipped because its buffer was too small."""

    def prepare(self, size: int) -> None:
        """Allocate buffers for states of `size` bytes in a thread; `copy` waits for the thread."""
        self._join()
        self._preparing = threading.Thread(target=self._prepare, args=(size,), name="slurmddp-memory")
        self._preparing.daemon = True
        self._preparing.start()

    def _prepare(self, size: int) -> None:
        """Allocate buffers; `copy` raises the error of this thread."""
        try:
            self._make_slots(size)
            for slot in self._slots:
                if _is_free(slot):
                    self._fit(slot, size)
        except NoMemory as why:
            self._refused = why

    def _join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def copy(
        self, snapshot: Snapshot, *, wait: bool = True, shards: ShardWriters | None = None
    ) -> int | None:
        """Copy a state into a buffer.

        Args:
            snapshot: the state.
            wait: whether to wait for the allocation of memory.
            shards: writes the shards of a sharded state.

        Returns:
            The number of the buffer. None if all buffers are being written to the disk, or another node makes
            no copy; without `wait` also if memory must be allocated first, which then begins in a thread.

        Raises:
            NoMemory: the memory is too small.
            CheckpointError: a checkpoint can't store the state.
        """
        check(snapshot.step, 1, snapshot.meta)
        flat = flatten(snapshot.state, sharded=shards is not None)
        head, tensors = layout(flat.tensors)
        tree = flat.to_json()

        sizes = {TENSORS_FILE: len(head) + sum(tensor.nbytes for tensor in tensors)}
        if shards is not None:
            sizes |= {shard_file(rank): size for rank, size in shards.sizes.items()}
        files, tensors_bytes = _places(sizes)

        facts: dict[str, Any] = {"root": str(snapshot.root), "meta": dict(snapshot.meta)}
        facts["versions"] = versions()
        if shards is not None:
            facts |= {"files": files, "ranks": shards.ranks}
        about = json.dumps(facts).encode()
        header = shared_buffer.StoredState(
            snapshot.step, snapshot.stamp, shared_buffer.PAGE_BYTES, tensors_bytes, len(tree), len(about)
        )

        if not wait and not self._is_ready(header.end):
            return None
        number = self._free_slot(header.end)
        if number is None:
            return None

        slot = self._slots[number]
        view = self._fit(slot, header.end)
        shared_buffer.invalidate(slot.descriptor)
        for start, text in [(header.tensors_at, head), (header.tree_at, tree), (header.about_at, about)]:
            view.area[start : start + len(text)] = text
        view.copy(tensors, header.tensors_at + len(head))
        if shards is not None:
            starts = {rank: header.tensors_at + files[shard_file(rank)][0] for rank in shards.sizes}
            if not shards.write(slot.descriptor, view, starts):
                return None
        shared_buffer.commit(slot.descriptor, header)
        return number

    def has_free(self) -> bool:
        """Return whether a buffer is free of writes."""
        return len(self._slots) < self._wanted or any(map(_is_free, self._slots))

    def _is_ready(self, size: int) -> bool:
        """Return whether buffers for a state of `size` bytes are allocated; start the allocation if not."""
        if self._preparing is not None and self._preparing.is_alive():
            return False
        self._join()

        # `copy` raises the error of a refused allocation.
        if self._refused is not None:
            return True
        is_missing = len(self._slots) < self._wanted
        is_small = any(slot.capacity < size and _is_free(slot) for slot in self._slots)
        if not is_missing and not is_small:
            return True

        self.prepare(size + self._growth(size))
        self._outgrown = size
        return False

    def _growth(self, size: int) -> int:
        """Return the bytes to add for a growing state, whose next copy would not fit otherwise."""
        if not self._outgrown:
            return 0
        return min(max(0, size - self._outgrown), size // _LARGEST_GROWTH)

    def _free_slot(self, size: int) -> int | None:
        """Return the number of the free buffer with the oldest state; None if all are being written."""
        self._join()
        self._make_slots(size)

        free = []
        for number, slot in enumerate(self._slots):
            if _is_free(slot):
                state = shared_buffer.read_header(slot.descriptor)
                # An empty buffer comes first.
                free.append(((-1, 0) if state is None else state.order, number))
        if not free:
            return None
        return min(free)[1]

    def _make_slots(self, size: int) -> None:
        """Create missing buffers, as many as the memory holds; raise NoMemory if it holds none."""
        if self._refused is not None:
            raise self._refused
        missing = self._wanted - len(self._slots)
        if missing <= 0:
            return

        available = available_bytes()
        copies = copies_that_fit(_rounded(size), available, missing)
        if copies < missing:
            self._wanted -= missing - copies
            self._warn_one_buffer(size, available)
        for _ in range(copies):
            self._slots.append(_Slot(shared_buffer.create()))
            self._register(len(self._slots) - 1, self._slots[-1].descriptor)

    def _warn_one_buffer(self, size: int, available: int) -> None:
        facts = f"A copy of the state takes {size_text(size)}, and {size_text(available)} of memory are left"
        if self._wanted == 0:
            self._refused = NoMemory(f"{facts}: training waits until each checkpoint is written.")
            raise self._refused
        log.warning("%s: one copy is held in place of two; each save waits for the write before it.", facts)

    def _fit(self, slot: _Slot, size: int) -> MappedTensor:
        """Return the map of a buffer, enlarged to `size` bytes if needed."""
        if slot.view is not None and slot.capacity >= size:
            return slot.view

        more = _rounded(size) - os.fstat(slot.descriptor).st_size
        available = available_bytes()
        if more > 0 and copies_that_fit(more, available) == 0:
            raise NoMemory(
                f"The state has grown by {size_text(more)}, and {size_text(available)} of memory are left: "
                "training waits until each checkpoint is written."
            )

        _unmap(slot)
        try:
            area = shared_buffer.reserve(slot.descriptor, _rounded(size))
        except OSError as error:
            raise NoMemory(
                f"No memory for a copy of {size_text(size)} ({error.strerror}): training waits until each "
                "checkpoint is written."
            ) from error
        slot.view = MappedTensor(area)
        return slot.view

    def states(self, root: Path) -> list[tuple[int, shared_buffer.StoredState, bool]]:
        """Return the descriptor, header and kind of each committed state that belongs under `root`.

        The kind is True for one node's part of a sharded state.
        """
        states = []
        for slot in self._slots:
            header = shared_buffer.read_header(slot.descriptor)
            if header is None:
                continue
            with shared_buffer.mapped(slot.descriptor, header) as stored:
                if stored.about["root"] == str(root):
                    states.append((slot.descriptor, header, stored.part is not None))
        return states

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors of the buffers, in the order of their numbers."""
        return [slot.descriptor for slot in self._slots]

    def discard_after(self, order: tuple[int, int]) -> None:
        """Invalidate states newer than `order`, because training resumes from that state."""
        for slot in self._slots:
            state = shared_buffer.read_header(slot.descriptor)
            if state is not None and state.order > order and _is_free(slot):
                shared_buffer.invalidate(slot.descriptor)

    def set_writing(self, number: int, writing: bool) -> None:
        """Mark a buffer as being written to the disk, or clear the mark."""
        shared_buffer.set_writing(self._slots[number].descriptor, writing)

    def is_writing(self) -> bool:
        """Return whether a process writes any of the states to the disk."""
        return not all(map(_is_free, self._slots))

    def set_urgent(self) -> None:
        """Mark all running writes as urgent."""
        for slot in self._slots:
            if not _is_free(slot):
                shared_buffer.set_urgent(slot.descriptor)

    def close(self) -> None:
        """Unmap and close the buffers here; the agent keeps its descriptors."""
        self._join()
        for slot in self._slots:
            _unmap(slot)
            os.close(slot.descriptor)
        self._slots.clear()


def _places(sizes: Mapping[str, int]) -> tuple[dict[str, tuple[int, int]], int]:
    """Return start and size of each file with tensors, and the end of the last; each starts at a page."""
    files = {}
    end = 0
    for name, size in sizes.items():
        start = -(-end // shared_buffer.PAGE_BYTES) * shared_buffer.PAGE_BYTES
        files[name] = (start, size)
        end = start + size
    return files, end


def _rounded(size: int) -> int:
    return -(-size // _ROUND_BYTES) * _ROUND_BYTES


def _is_free(slot: _Slot) -> bool:
    """Return whether no process writes the state of a buffer to the disk."""
    return not shared_buffer.is_writing(slot.descriptor)


def _unmap(slot: _Slot) -> None:
    if slot.view is not None:
        view = slot.view
        slot.view = None
        view.close()


def read_state(step: int, stored: shared_buffer.StateBytes, mesh: DeviceMesh | None = None) -> Checkpoint:
    """Decode a stored state; its tensors are copies, with `mesh` as in `checkpoint.read`."""

    def read_file(name: str) -> dict[str, torch.Tensor]:
        start, size = stored.files[name]
        return decode(Bytes(stored.tensors[start : start + size]), size)

    try:
        content = json.loads(bytes(stored.tree))
        check_format(content["format"])
        tensors = read_file(TENSORS_FILE) | joined(content.get("shards", {}), read_file, mesh)
        return Checkpoint(step, unflatten(content["state"], tensors), stored.about["meta"])
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"The state of step {step} in memory can't be decoded: {error}.") from error
