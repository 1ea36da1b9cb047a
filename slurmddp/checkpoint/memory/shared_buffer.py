"""Store one training state in a memory file (memfd), which outlives the rank that wrote it.

After a header of one page the file has three parts: the bytes of the checkpoint's tensor files, the bytes of
its tree, and `about`: JSON with the folder, the metadata and the software versions of the checkpoint.
The header has three flags of eight bytes. The kernel writes each flag at once:

- committed: a rank clears it before it changes the first byte, and sets it after the last byte. So no process
  reads an interrupted copy.
- writing: set while a process writes the state to the disk. No rank overwrites the state meanwhile.
- urgent: set while a process waits until the state is on the disk.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any

from slurmddp.checkpoint.files.manifest import TENSORS_FILE, shard_file
from slurmddp.environments.names import MEMORY_VARIABLE

PAGE_BYTES = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_MAGIC = b"SDDPmem1"
_HEADER = struct.Struct("<8s8q")
# Offsets of the flags in bytes. `urgent` follows the fields of _HEADER.
_COMMITTED_AT = 8
_WRITING_AT = 16
_URGENT_AT = _HEADER.size
_WORD = struct.Struct("<q")
_CHUNK_BYTES = 32 << 20
"""Bytes per madvise call: the kernel holds a lock during the call, and other threads may wait for it."""
# MADV_POPULATE_WRITE and MADV_HUGEPAGE, from the kernel's mman.h; Python's mmap module lacks the first.
_POPULATE_WRITE = 23
_HUGE_PAGE = 14


@dataclass(frozen=True)
class StoredState:
    """Header of a committed state: its step and stamp, and where its parts are in the memory file."""

    step: int
    stamp: int
    """Nanoseconds since the epoch, the same on all nodes; it distinguishes states of the same step."""
    tensors_at: int
    tensors_bytes: int
    tree_bytes: int
    about_bytes: int

    @property
    def order(self) -> tuple[int, int]:
        """Return the key by which states are sorted: a newer state has a greater key."""
        return self.step, self.stamp

    @property
    def tree_at(self) -> int:
        return self.tensors_at + self.tensors_bytes

    @property
    def about_at(self) -> int:
        return self.tree_at + self.tree_bytes

    @property
    def end(self) -> int:
        return self.about_at + self.about_bytes


@dataclass(frozen=True)
class StateBytes:
    """The bytes of a state in mapped memory: all bytes, and the three parts; `about` is decoded."""

    whole: memoryview
    tensors: memoryview
    tree: memoryview
    about: dict[str, Any]

    @classmethod
    def of(cls, whole: memoryview, state: StoredState) -> StateBytes:
        """Split `whole`, the bytes of a memory file without its header, into tensors, tree and `about`."""
        tree_at = state.tensors_bytes
        about_at = tree_at + state.tree_bytes

        about = json.loads(bytes(whole[about_at:]))
        return cls(whole, whole[:tree_at], whole[tree_at:about_at], about)

    @property
    def files(self) -> dict[str, tuple[int, int]]:
        """Return the first byte in `tensors` and the size in bytes of each file with tensors, by name."""
        places = self.about.get("files", {TENSORS_FILE: (0, len(self.tensors))})
        return {name: (start, size) for name, (start, size) in places.items()}

    @property
    def ranks(self) -> int:
        """Return the number of ranks, on all nodes, that have shards of the state; 0 without shards."""
        return int(self.about.get("ranks", 0))

    @property
    def part(self) -> int | None:
        """Return the number of this node's part of the state: the first rank whose shards are in this memory.

        None if no other node has shards. The node with part 0 publishes the checkpoint, and the other nodes
        write their shards for it.
        """
        ranks = [rank for rank in range(self.ranks) if shard_file(rank) in self.files]
        if len(ranks) == self.ranks:
            return None
        return ranks[0]


def create() -> int:
    """Create an empty memory file and return its descriptor."""
    return os.memfd_create("slurmddp-state", os.MFD_CLOEXEC)


def from_environment(environ: Mapping[str, str]) -> list[int]:
    """Return the descriptors of the memory files that this rank has inherited from the agent.

    Descriptors in the environment variable that are no such memory files are left out.
    """
    numbers = [int(word) for word in environ.get(MEMORY_VARIABLE, "").split(",") if word.isdecimal()]
    return [number for number in numbers if _is_memory(number)]


def _is_memory(descriptor: int) -> bool:
    try:
        return "memfd:slurmddp-state" in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    except OSError:
        return False


def read_header(descriptor: int) -> StoredState | None:
    """Return the header of the committed state in a memory file; None if there is none, or it is cut off."""
    data = os.pread(descriptor, _HEADER.size, 0)
    if len(data) < _HEADER.size:
        return None
    magic, committed, _, *facts = _HEADER.unpack(data)
    if magic != _MAGIC or not committed:
        return None

    state = StoredState(*facts)
    is_whole = state.end <= os.fstat(descriptor).st_size
    return state if is_whole else None


def invalidate(descriptor: int) -> None:
    """Clear the flags and the header of a memory file, before its bytes are changed."""
    os.pwrite(descriptor, _HEADER.pack(_MAGIC, *[0] * 8), 0)


def commit(descriptor: int, state: StoredState) -> None:
    """Write the header of `state` and mark it as committed, after its last byte has been written."""
    # Set the flag by a second write, so that no reader takes a half-written header for a committed state.
    os.pwrite(descriptor, _HEADER.pack(_MAGIC, 0, 0, *astuple(state)), 0)
    os.pwrite(descriptor, _WORD.pack(1), _COMMITTED_AT)


def set_writing(descriptor: int, writing: bool) -> None:
    """Set or clear the flag `writing`, and clear the flag `urgent` in both cases."""
    os.pwrite(descriptor, _WORD.pack(0), _URGENT_AT)
    os.pwrite(descriptor, _WORD.pack(writing), _WRITING_AT)


def is_writing(descriptor: int) -> bool:
    """Return whether the flag `writing` is set: a process writes the state to the disk."""
    return _word(descriptor, _WRITING_AT)


def set_urgent(descriptor: int) -> None:
    """Set the flag `urgent`: a process waits until the state is on the disk."""
    os.pwrite(descriptor, _WORD.pack(1), _URGENT_AT)


def is_urgent(descriptor: int) -> bool:
    """Return whether the flag `urgent` is set: a process waits until the state is on the disk."""
    return _word(descriptor, _URGENT_AT)


def _word(descriptor: int, at: int) -> bool:
    data = os.pread(descriptor, _WORD.size, at)
    return len(data) == _WORD.size and _WORD.unpack(data)[0] != 0


def newest_step(descriptors: Sequence[int]) -> int | None:
    """Return the greatest step of the committed states in memory files; None without a committed state."""
    states = map(read_header, descriptors)
    return max((state.step for state in states if state is not None), default=None)


@contextmanager
def mapped(descriptor: int, state: StoredState) -> Iterator[StateBytes]:
    """Map a committed state of a memory file, and yield its bytes, which are valid until the context ends."""
    area = mmap.mmap(descriptor, state.end, prot=mmap.PROT_READ)
    try:
        with _parts(area, state) as parts:
            yield parts
    finally:
        _close(area)


class MappedFile:
    """A memory file that stays mapped between reads: to map its pages takes longer than to read them."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._area: mmap.mmap | None = None

    @contextmanager
    def mapped(self, state: StoredState) -> Iterator[StateBytes]:
        """Yield the bytes of a committed state, which are valid until the context ends."""
        if self._area is None or len(self._area) < state.end:
            self._unmap()
            # Map the whole file and not only this state, because the next state may be longer.
            self._area = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ)
        with _parts(self._area, state) as parts:
            yield parts

    def close(self) -> None:
        """Unmap and close the file."""
        self._unmap()
        os.close(self.descriptor)

    def _unmap(self) -> None:
        if self._area is not None:
            _close(self._area)
            self._area = None


@contextmanager
def _parts(area: mmap.mmap, state: StoredState) -> Iterator[StateBytes]:
    everything = memoryview(area)
    parts = StateBytes.of(everything[state.tensors_at : state.end], state)

    try:
        yield parts
    finally:
        # Release all views, because a map can't be closed before.
        for view in (parts.tensors, parts.tree, parts.whole, everything):
            view.release()


def _close(area: mmap.mmap) -> None:
    # A map can't be closed while the traceback of an exception refers to a view of it. It is freed later,
    # with the traceback.
    with suppress(BufferError):
        area.close()


def reserve(descriptor: int, size: int) -> mmap.mmap:
    """Make a memory file at least `size` bytes long, allocate all its pages, and return a map of it.

    Pages are allocated here because an allocation that fails at the first use kills the process with SIGBUS.

    Raises:
        OSError: the allocation failed, usually with ENOMEM. The file has its former size again.
    """
    size_before = os.fstat(descriptor).st_size
    area: mmap.mmap | None = None

    try:
        if size_before < size:
            os.ftruncate(descriptor, -(-size // PAGE_BYTES) * PAGE_BYTES)
        area = mmap.mmap(descriptor, 0)
        _populate(descriptor, area)
    except BaseException:
        if area is not None:
            area.close()
        os.ftruncate(descriptor, size_before)
        raise

    return area


def _populate(descriptor: int, area: mmap.mmap) -> None:
    size = len(area)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    # Ask for huge pages, which are faster. If the system has disabled them, the advice has no effect.
    _advise(address, size, _HUGE_PAGE)

    for start in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - start)
        code = _advise(address + start, length, _POPULATE_WRITE)

        if code == errno.EINVAL:
            # Kernels before 5.14 lack this advice. Reserve the memory, whose pages are mapped at first use.
            os.posix_fallocate(descriptor, start, length)
        elif code:
            # madvise(2) returns EFAULT if the first use of a page would raise SIGBUS, so no memory is left.
            code = errno.ENOMEM if code == errno.EFAULT else code
            raise OSError(code, os.strerror(code))


def _advise(address: int, size: int, advice: int) -> int:
    """Call madvise(2), and return its errno; 0 for success."""
    result = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if result else 0
