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
"""For a growing state, at most 1 / _LARGEST_GROWTH of its size is allocated in addition."""


class NoMemory(Exception):
    """The memory is too small for a copy of the state; the message gives the sizes and the consequence."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a training after a step, which is to be saved."""

    root: Path
    """The folder of all checkpoints of the training."""
    step: int
    stamp: int
    """Nanoseconds since the epoch, the same for the copies of all nodes."""
    state: Mapping[str, Any]
    meta: Mapping[str, Any]
    """The arguments `state` and `meta` of `checkpoint.write`."""


class ShardWriters(Protocol):
    """Interface to the ranks of a node, which copy their shards into the buffer of the node's first rank."""

    ranks: int
    """Number of ranks of all nodes."""
    sizes: Mapping[int, int]
    """Size in bytes of the shard file of each rank of this node, by rank."""

    def write(self, descriptor: int, view: MappedTensor, starts: Mapping[int, int]) -> bool:
        """Let each rank of this node copy its shard file into a memory file.

        Args:
            descriptor: the descriptor of the memory file.
            view: the map of the memory file.
            starts: by rank, the first byte of its shard file in the memory file.

        Returns:
            False if another node makes no copy, so that the copy of this node is useless.
        """


@dataclass
class _Slot:
    """A memory file, and its map; None before the file is mapped."""

    descriptor: int
    view: MappedTensor | None = None

    @property
    def capacity(self) -> int:
        return 0 if self.view is None else len(self.view.area)


class StagingBuffers:
    """The staging buffers of one rank: memory files into which it copies its states.

    Args:
        inherited: descriptors of the buffers that the agent kept from an earlier process, in the order of
            their numbers.
        register: called with the number and the descriptor of each new buffer.
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
        """Size in bytes of the last state that was not copied because its buffer was too small."""

    def prepare(self, size: int) -> None:
        """Start a thread that allocates buffers for states of `size` bytes; `copy` waits for it."""
        self._join()
        self._preparing = threading.Thread(target=self._prepare, args=(size,), name="slurmddp-memory")
        self._preparing.daemon = True
        self._preparing.start()

    def _prepare(self, size: int) -> None:
        """Allocate buffers for states of `size` bytes; store a NoMemory error, which `copy` raises."""
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
            wait: whether to wait if memory must be allocated first. If False, the allocation is started in a
                thread, and None is returned.
            shards: the ranks that copy the shards of a sharded state. None: the state is not sharded.

        Returns:
            The number of the buffer. None without a copy: all buffers are being written to the disk, another
            node makes no copy, or (see `wait`) memory must be allocated first.

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
        """Return whether a buffer is free: it is not being written to the disk, or does not exist yet."""
        return len(self._slots) < self._wanted or any(map(_is_free, self._slots))

    def _is_ready(self, size: int) -> bool:
        """Return whether buffers for `size` bytes are allocated; start the allocation in a thread if not."""
        if self._preparing is not None and self._preparing.is_alive():
            return False
        self._join()

        # The allocation was refused. Return True, so that `copy` continues and raises the error.
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
        """Return the number of bytes to allocate beyond `size` for a state that grows from copy to copy.

        The next state would not fit otherwise. 0 if no earlier state was too large for its buffer.
        """
        if not self._outgrown:
            return 0
        return min(max(0, size - self._outgrown), size // _LARGEST_GROWTH)

    def _free_slot(self, size: int) -> int | None:
        """Create missing buffers, and return the number of the buffer whose state `copy` may overwrite.

        It is the oldest state that is not being written to the disk. None if all are being written.
        """
        self._join()
        self._make_slots(size)

        free = []
        for number, slot in enumerate(self._slots):
            if _is_free(slot):
                state = shared_buffer.read_header(slot.descriptor)
                # An empty buffer counts as the oldest.
                free.append(((-1, 0) if state is None else state.order, number))
        if not free:
            return None
        return min(free)[1]

    def _make_slots(self, size: int) -> None:
        """Create missing buffers for states of `size` bytes, as many as fit into the memory.

        Raises:
            NoMemory: none fits, or an earlier allocation was refused.
        """
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
            self._refused = NoMemory(f"{facts}. So training waits until each checkpoint is written.")
            raise self._refused
        log.warning(
            "%s, too little for two copies: each save waits until the save before it is written.", facts
        )

    def _fit(self, slot: _Slot, size: int) -> MappedTensor:
        """Return the map of a buffer; enlarge the buffer to `size` bytes first if it is smaller.

        Raises:
            NoMemory: the memory is too small.
        """
        if slot.view is not None and slot.capacity >= size:
            return slot.view

        more = _rounded(size) - os.fstat(slot.descriptor).st_size
        available = available_bytes()
        if more > 0 and copies_that_fit(more, available) == 0:
            raise NoMemory(
                f"The state has grown by {size_text(more)}, and {size_text(available)} of memory are left. "
                "So training waits until each checkpoint is written."
            )

        _unmap(slot)
        try:
            area = shared_buffer.reserve(slot.descriptor, _rounded(size))
        except OSError as error:
            raise NoMemory(
                f"The memory for a copy of {size_text(size)} could not be allocated ({error.strerror}). "
                "So training waits until each checkpoint is written."
            ) from error
        slot.view = MappedTensor(area)
        return slot.view

    def states(self, root: Path) -> list[tuple[int, shared_buffer.StoredState, bool]]:
        """Return the committed states in the buffers that belong to the checkpoint folder `root`.

        Returns:
            For each state the descriptor of its buffer, its header, and whether it is only this node's part
            of a sharded state.
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
        """Invalidate all states newer than the state with the sort key `order`, from which training resumes.

        A state that is being written to the disk stays.
        """
        for slot in self._slots:
            state = shared_buffer.read_header(slot.descriptor)
            if state is not None and state.order > order and _is_free(slot):
                shared_buffer.invalidate(slot.descriptor)

    def set_writing(self, number: int, writing: bool) -> None:
        """Set or clear the flag that buffer `number` is being written to the disk."""
        shared_buffer.set_writing(self._slots[number].descriptor, writing)

    def is_writing(self) -> bool:
        """Return whether the state of any buffer is being written to the disk."""
        return not all(map(_is_free, self._slots))

    def set_urgent(self) -> None:
        """Set the flag `urgent` of all buffers that are being written: a process waits for the writes."""
        for slot in self._slots:
            if not _is_free(slot):
                shared_buffer.set_urgent(slot.descriptor)

    def close(self) -> None:
        """Unmap and close the buffers in this process. The states stay, because the agent keeps them open."""
        self._join()
        for slot in self._slots:
            _unmap(slot)
            os.close(slot.descriptor)
        self._slots.clear()


def _places(sizes: Mapping[str, int]) -> tuple[dict[str, tuple[int, int]], int]:
    """Place files with tensors one after the other in memory, each at the start of a page.

    Args:
        sizes: the size in bytes of each file, by name.

    Returns:
        The first byte and the size of each file, by name, and the end of the last file.
    """
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
    """Return whether the buffer may be overwritten: its state is not being written to the disk."""
    return not shared_buffer.is_writing(slot.descriptor)


def _unmap(slot: _Slot) -> None:
    if slot.view is not None:
        view = slot.view
        slot.view = None
        view.close()


def read_state(step: int, stored: shared_buffer.StateBytes, mesh: DeviceMesh | None = None) -> Checkpoint:
    """Decode a state from the memory of a buffer into new tensors.

    Args:
        step: the step of the state.
        stored: the bytes of the state.
        mesh: as in `checkpoint.read`.

    Raises:
        CheckpointError: the bytes can't be decoded.
    """

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
