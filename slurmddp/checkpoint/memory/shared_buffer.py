"""One training state in a memory file (memfd): what a rank leaves there is still there when the rank is dead.

A header of one page tells where the parts lie: the very bytes of the checkpoint's tensor file, those of its
tree, and `about`, JSON with what else the checkpoint is to say. The header's word `sealed` is taken away
before the first byte changes and put back after the last one, so a copy that a kill cut short is none.
`busy` is set as long as somebody writes the state to the disk, and `awaited` beside it once somebody waits
for that. Every word is eight bytes, written at once.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from slurmddp.environments.names import MEMORY_VARIABLE

PAGE_BYTES = 4096

_MAGIC = b"SDDPmem1"
_HEADER = struct.Struct("<8s8q")
_SEALED_AT, _BUSY_AT, _AWAITED_AT = 8, 16, _HEADER.size
_WORD = struct.Struct("<q")
_CHUNK_BYTES = 32 << 20
"""So much is asked of the kernel at once: it holds a lock meanwhile that other threads may wait for."""
_POPULATE_WRITE, _HUGE_PAGE = 23, 14


@dataclass(frozen=True)
class Sealed:
    """Where the parts of a whole state lie, in bytes from the begin of its memory file."""

    step: int
    stamp: int
    """Tells states of one step apart, on all nodes alike; a later one has a higher one."""
    tensors_at: int
    tensors_bytes: int
    tree_bytes: int
    about_bytes: int

    @property
    def order(self) -> tuple[int, int]:
        """Of two states the newer one has more."""
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
class Parts:
    """The bytes of a state, all together and one by one."""

    whole: memoryview
    tensors: memoryview
    tree: memoryview
    about: dict[str, Any]

    @classmethod
    def of(cls, whole: memoryview, state: Sealed) -> Parts:
        """Take apart what lies between the begin of the tensors and the end."""
        tree_at, about_at = state.tensors_bytes, state.tensors_bytes + state.tree_bytes
        about = json.loads(bytes(whole[about_at:]))
        return cls(whole, whole[:tree_at], whole[tree_at:about_at], about)


def create() -> int:
    """Return a new, empty memory file."""
    return os.memfd_create("slurmddp-state", os.MFD_CLOEXEC)


def from_environment(environ: Mapping[str, str]) -> list[int]:
    """Return the memory files that the agent has handed to this rank; what is no such file is left out."""
    numbers = [int(word) for word in environ.get(MEMORY_VARIABLE, "").split(",") if word.isdecimal()]
    return [number for number in numbers if _is_memory(number)]


def _is_memory(descriptor: int) -> bool:
    try:
        return "memfd:slurmddp-state" in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    except OSError:
        return False


def read_header(descriptor: int) -> Sealed | None:
    """Return where a whole state lies, or None where there is none."""
    data = os.pread(descriptor, _HEADER.size, 0)
    if len(data) < _HEADER.size:
        return None
    magic, sealed, _, *facts = _HEADER.unpack(data)
    if magic != _MAGIC or not sealed:
        return None
    found = Sealed(*facts)
    return found if found.end <= os.fstat(descriptor).st_size else None


def unseal(descriptor: int) -> None:
    """Say that the bytes are about to change."""
    os.pwrite(descriptor, _HEADER.pack(_MAGIC, *[0] * 8), 0)


def seal(descriptor: int, state: Sealed) -> None:
    """Say that all bytes of `state` are in place."""
    os.pwrite(descriptor, _HEADER.pack(_MAGIC, 0, 0, *astuple(state)), 0)
    os.pwrite(descriptor, _WORD.pack(1), _SEALED_AT)


def set_busy(descriptor: int, busy: bool) -> None:
    """Say that somebody writes the state to the disk, or does no longer: it must not change meanwhile."""
    os.pwrite(descriptor, _WORD.pack(0), _AWAITED_AT)
    os.pwrite(descriptor, _WORD.pack(busy), _BUSY_AT)


def is_busy(descriptor: int) -> bool:
    """Tell whether the state is being written to the disk."""
    return _word(descriptor, _BUSY_AT)


def set_awaited(descriptor: int) -> None:
    """Say that somebody waits until the state is written."""
    os.pwrite(descriptor, _WORD.pack(1), _AWAITED_AT)


def is_awaited(descriptor: int) -> bool:
    """Tell whether somebody waits until the state is written."""
    return _word(descriptor, _AWAITED_AT)


def _word(descriptor: int, at: int) -> bool:
    data = os.pread(descriptor, _WORD.size, at)
    return len(data) == _WORD.size and _WORD.unpack(data)[0] != 0


def newest(descriptors: Iterable[int]) -> int | None:
    """Return the memory file with the newest whole state, or None."""
    sealed = [(found.order, number) for number in descriptors if (found := read_header(number))]
    return max(sealed)[1] if sealed else None


def newest_step(descriptors: Sequence[int]) -> int | None:
    """Return the step of the newest whole state, or None."""
    return max((found.step for number in descriptors if (found := read_header(number))), default=None)


@contextmanager
def mapped(descriptor: int, state: Sealed) -> Iterator[Parts]:
    """Hold the bytes of a whole state in view, without a copy; the view ends with the context."""
    area = mmap.mmap(descriptor, state.end, prot=mmap.PROT_READ)
    try:
        with _parts(area, state) as parts:
            yield parts
    finally:
        _close(area)


class Held:
    """A memory file that stays in view: to find its pages takes longer than to read what is in them."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._area: mmap.mmap | None = None

    @contextmanager
    def mapped(self, state: Sealed) -> Iterator[Parts]:
        """Hold the bytes of a whole state in view, as the function of this name does."""
        if self._area is None or len(self._area) < state.end:
            self._let_go()
            self._area = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ)
        with _parts(self._area, state) as parts:
            yield parts

    def close(self) -> None:
        """Let go of the file."""
        self._let_go()
        os.close(self.descriptor)

    def _let_go(self) -> None:
        if self._area is not None:
            _close(self._area)
            self._area = None


@contextmanager
def _parts(area: mmap.mmap, state: Sealed) -> Iterator[Parts]:
    everything = memoryview(area)
    parts = Parts.of(everything[state.tensors_at : state.end], state)
    try:
        yield parts
    finally:
        for view in (parts.tensors, parts.tree, parts.whole, everything):
            view.release()


def _close(area: mmap.mmap) -> None:
    with suppress(BufferError):  # The frames of an error may hold slices; the map goes with them.
        area.close()


def reserve(descriptor: int, size: int) -> mmap.mmap:
    """Make the file at least `size` bytes long, with all its pages in place, and return a view of it.

    Raises OSError, ENOMEM as a rule, where the memory is not to be had, and gives back what was had of it; a
    page that is missing later on would end the process.
    """
    before = os.fstat(descriptor).st_size
    area: mmap.mmap | None = None
    try:
        if before < size:
            os.ftruncate(descriptor, -(-size // PAGE_BYTES) * PAGE_BYTES)
        area = mmap.mmap(descriptor, 0)
        _populate(descriptor, area)
    except BaseException:
        if area is not None:
            area.close()
        os.ftruncate(descriptor, before)
        raise
    return area


def _populate(descriptor: int, area: mmap.mmap) -> None:
    size = len(area)
    place = ctypes.addressof(ctypes.c_char.from_buffer(area))
    _advise(place, size, _HUGE_PAGE)  # Fewer pages to make and to find; without effect where not allowed.
    for start in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - start)
        code = _advise(place + start, length, _POPULATE_WRITE)
        if code == errno.EINVAL:
            # A kernel before 5.14: the memory can be had, the pages come with their use.
            os.posix_fallocate(descriptor, start, length)
        elif code:
            code = errno.ENOMEM if code == errno.EFAULT else code
            raise OSError(code, os.strerror(code))


def _advise(place: int, size: int, advice: int) -> int:
    return ctypes.get_errno() if _madvise()(place, size, advice) else 0


@cache
def _madvise() -> Any:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call
