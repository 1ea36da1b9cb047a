"""Durable files: written, hashed on the way, and flushed to the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from slurmddp.checkpoint.files import space
from slurmddp.errors import CheckpointError
from slurmddp.host.atomic_file import replacing

CHUNK_BYTES = 4 << 20

ALGORITHM = "xxh3_128"
"""Name of the digest in manifests. The digest finds damage, not forgery: a person who can change the files
can also change the manifest. So it was chosen for speed (`benchmarks/checkpoint_hash.py`)."""

Digest = xxhash.xxh3_128

_BLOCK_BYTES = 4096
"""Alignment of direct writes, in the file and in memory: no disk needs more, and pages are no smaller."""
_MOUNTS = Path("/proc/self/mountinfo")
_DIRECT = frozenset({"ext4", "xfs"})
"""File systems that get direct writes (O_DIRECT). Some network file systems are slow at them."""
_REST_PER_TIME, _REST_PER_CPU_TIME = 1.0, 2.5
"""After each piece a background write sleeps for the smaller of two times: the first factor times the seconds
of the piece, the second factor times its processor seconds. The sleep spreads the cost to the training. The
second bound keeps writes to slow disks as fast as `torch.save`: there the processors idle anyway."""
_RAMP_BYTES, _RAMP_END = 64 << 20, 2.0
"""Sleeps grow linearly with the bytes written, by their first length for each _RAMP_BYTES, up to the factor
_RAMP_END. So a small state is durable almost as soon as by `torch.save` and a flush."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and digest of one file, as the manifest lists them."""

    size: int
    digest: str


def write_hashed(
    path: Path, parts: Iterable[memoryview], *, expected: int = 0, in_memory: bool = False
) -> FileRecord:
    """Write a new file, flush it to the disk, and return its size and digest.

    Args:
        path: the file, which must not exist.
        parts: the bytes of the file, in order.
        expected: number of bytes to reserve; 0 reserves nothing.
        in_memory: whether all parts stay in memory during the call. Then they are hashed during the flush;
            otherwise each part is hashed right after its write.

    Raises:
        NoRoomError: disk or quota have fewer than `expected` bytes left; nothing was written.
        OSError: the write or the flush failed.
    """
    digest, size, unhashed = Digest(), 0, []
    with path.open("xb", buffering=1 << 20) as stream:
        space.reserve(stream.fileno(), expected, path.parent)
        for chunk in _chunks(parts):
            stream.write(chunk)
            space.write_back(stream.fileno(), size, len(chunk))
            size += len(chunk)
            if in_memory:
                unhashed.append(chunk)
            else:
                digest.update(chunk)
        stream.flush()
        if not in_memory:
            os.fsync(stream.fileno())
            return FileRecord(size, digest.hexdigest())
        with ThreadPoolExecutor(1) as thread:
            flushed = thread.submit(os.fsync, stream.fileno())
            for chunk in unhashed:
                digest.update(chunk)
            flushed.result()
    return FileRecord(size, digest.hexdigest())


def copy_hashed(
    path: Path, source: int, start: int, part: memoryview, *, is_urgent: Callable[[], bool] = lambda: True
) -> FileRecord:
    """Copy a part of a memory file to a new file, flush it to the disk, and return its size and digest.

    On file systems with good direct writes the disk reads the bytes from the memory; elsewhere the kernel
    copies from file to file. Each piece is hashed during its write.

    Args:
        path: the new file, which must not exist.
        source: descriptor of the memory file.
        start: where the part begins in the memory file, in bytes.
        part: a map of these bytes.
        is_urgent: asked after each piece; while it returns False, a sleep follows the piece.
    """
    with path.open("xb", buffering=0) as stream, ThreadPoolExecutor(1) as thread:
        space.reserve(stream.fileno(), len(part), path.parent)
        target = _CopyTarget(path, stream.fileno(), source, start)
        digest, throttle = Digest(), _Throttle(is_urgent)
        for chunk in _chunks([part]):
            written = thread.submit(target.write, chunk)
            digest.update(chunk)
            written.result()
            throttle.rest(len(chunk))
        os.fsync(stream.fileno())
    return FileRecord(len(part), digest.hexdigest())


class _Throttle:
    """Sleeps between the pieces of a background write; a process has at most one such write at a time."""

    def __init__(self, is_urgent: Callable[[], bool]) -> None:
        self._is_urgent, self._done = is_urgent, 0
        self._began, self._worked = time.monotonic(), time.process_time()

    def rest(self, count: int) -> None:
        """Sleep in proportion to the time of the last `count` bytes, unless the write is urgent."""
        self._done += count
        if not self._is_urgent():
            took, worked = time.monotonic() - self._began, time.process_time() - self._worked
            ramp = min(1.0 + self._done / _RAMP_BYTES, _RAMP_END)
            time.sleep(ramp * min(_REST_PER_TIME * took, _REST_PER_CPU_TIME * worked))
        self._began, self._worked = time.monotonic(), time.process_time()


class _CopyTarget:
    """A new file that receives, piece by piece, the bytes of the file `source` from `start` on."""

    def __init__(self, path: Path, descriptor: int, source: int, start: int) -> None:
        self._descriptor, self._source, self._start = descriptor, source, start
        self._done = 0
        self._flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        self._direct = start % _BLOCK_BYTES == 0 and _takes_direct(path)
        if self._direct:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, self._flags | os.O_DIRECT)

    def write(self, chunk: memoryview) -> None:
        """Write the next bytes and let the disk begin with them."""
        written = self._write_direct(chunk) if self._direct else 0
        while written < len(chunk):
            sent = _send(self._descriptor, self._source, self._start + self._done + written, chunk[written:])
            space.write_back(self._descriptor, self._done + written, sent)
            written += sent
        self._done += written

    def _write_direct(self, chunk: memoryview) -> int:
        """Write whole blocks past the kernel's cache; return the number of bytes written."""
        written, whole = 0, len(chunk) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            while written < whole and written % _BLOCK_BYTES == 0:
                written += os.write(self._descriptor, chunk[written:whole])
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this file system refuses direct writes.
                raise
        if written < len(chunk):
            self._direct = False
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags)
        return written


def _takes_direct(path: Path) -> bool:
    """Tell whether `path` is on a local file system with good direct writes."""
    device = path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        # A folder's name may hold any bytes; the kernel escapes only blanks and line ends.
        mounts = _MOUNTS.read_text(encoding="latin-1").split("\n")
    except OSError:
        return False
    lines = (line.split(" ") for line in mounts if line)
    return any(fields[2] == name and fields[fields.index("-") + 1] in _DIRECT for fields in lines)


def _send(target: int, source: int, start: int, chunk: memoryview) -> int:
    """Copy at least one byte by sendfile, or by a plain write if the file system has no sendfile."""
    try:
        sent = os.sendfile(target, source, start, len(chunk))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        sent = os.write(target, chunk)
    if sent == 0:
        raise OSError(errno.EIO, "The memory file of the state has become shorter")
    return sent


class HashedReader:
    """Reads a file once, from front to back, and keeps size and digest of the bytes read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = Digest()
        self._size = 0

    def readinto(self, buffer: memoryview) -> None:
        """Fill `buffer`; raises CheckpointError if the file ends too early."""
        for chunk in _chunks([buffer]):
            filled = 0
            while filled < len(chunk):
                count = self._stream.readinto(chunk[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError("The file ends too early.")
                filled += count
            self._digest.update(chunk)
            self._size += filled

    def drain(self) -> None:
        """Read and hash the rest of the file."""
        while data := self._stream.read(CHUNK_BYTES):
            self._digest.update(data)
            self._size += len(data)

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._digest.hexdigest())


@contextmanager
def open_hashed(path: Path) -> Iterator[HashedReader]:
    """Open `path` for a single hashed pass."""
    with path.open("rb", buffering=0) as stream:
        yield HashedReader(stream)


def record_of(path: Path) -> FileRecord:
    """Read a file and return its size and digest."""
    with open_hashed(path) as reader:
        reader.drain()
        return reader.record()


def write_small(path: Path, text: str) -> None:
    """Replace `path` durably by a file with `text`; after a power cut it holds the old or the new text."""
    with replacing(path) as stream:
        stream.write(text.encode())
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder, so that its renames and new names are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders; their renames are durable without it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _chunks(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            yield part[start : start + CHUNK_BYTES]
