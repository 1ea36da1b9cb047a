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
from functools import partial
from pathlib import Path
from typing import IO

import xxhash

from slurmddp.checkpoint.files import space
from slurmddp.errors import CheckpointError
from slurmddp.host.atomic_file import replacing

CHUNK_BYTES = 4 << 20

ALGORITHM = "xxh3_128"
"""What manifests call the digest below. It finds damage, not forgery: whoever can change a checkpoint's files
can change its manifest too. So speed decides (`benchmarks/checkpoint_hash.py`)."""

Digest = xxhash.xxh3_128

_BLOCK_BYTES = 4096
"""No disk asks that more than this be aligned; memory is aligned with its pages, which are no smaller."""
_MOUNTS = Path("/proc/self/mountinfo")
_DIRECT = frozenset({"ext4", "xfs"})
"""Network file systems have ways of their own with what goes past the cache, and some are slow at it."""
_REST, _REST_OF_WORK = 1.0, 2.5
"""A write beside a training rests after each piece for so many times as long as the piece took. What it costs
the training goes with the bytes, so it is to be spread. But the state should be durable no later than by
`torch.save`, which spends time on copies instead; so where the disk is slow, and leaves the processors alone
anyway, a rest is no longer than so many times the processors' work."""
_SMALL_BYTES, _LONGEST = 64 << 20, 2.0
"""With each so many bytes rests grow by their first length, up to so many times that: there are moments in
which disk and kernel take a small state at once, and then `torch.save` and a flush take hardly longer."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and digest of one file, as the manifest keeps them."""

    size: int
    digest: str


def write_hashed(
    path: Path, parts: Iterable[memoryview], *, expected: int = 0, held: bool = False
) -> FileRecord:
    """Write a new file, flush it to the disk, and return its size and digest.

    `held` says that the parts stay in memory anyway: they are hashed while the disk is at work on the flush,
    which costs no time unless the disk is faster than the hash; else each is hashed right after its write.
    Raises NoRoomError before the first byte when `expected` bytes are more than disk or quota have left.
    """
    digest, size, unhashed = Digest(), 0, []
    with path.open("xb", buffering=1 << 20) as stream:
        space.reserve(stream.fileno(), expected, path.parent)
        for chunk in _chunks(parts):
            stream.write(chunk)
            space.write_back(stream.fileno(), size, len(chunk))
            size += len(chunk)
            if held:
                unhashed.append(chunk)
            else:
                digest.update(chunk)
        stream.flush()
        if not held:
            os.fsync(stream.fileno())
            return FileRecord(size, digest.hexdigest())
        with _beside(partial(os.fsync, stream.fileno())):
            for chunk in unhashed:
                digest.update(chunk)
    return FileRecord(size, digest.hexdigest())


def copy_hashed(
    path: Path, source: int, start: int, part: memoryview, *, hurry: Callable[[], bool] = lambda: True
) -> FileRecord:
    """Write `part`, which lies at `start` in the file behind `source`, as `write_hashed` does what is held.

    The disk takes the bytes from memory as they lie, where the file system is known to do that well;
    elsewhere the kernel copies from file to file. Each piece is hashed meanwhile, and followed by a rest as
    long as there is no `hurry`, which is asked again and again.
    """
    with path.open("xb", buffering=0) as stream, ThreadPoolExecutor(1) as beside:
        space.reserve(stream.fileno(), len(part), path.parent)
        target = _Target(path, stream.fileno(), source, start)
        digest, pace = Digest(), _Pace(hurry)
        for chunk in _chunks([part]):
            taken = beside.submit(target.take, chunk)
            digest.update(chunk)
            taken.result()
            pace.rest(len(chunk))
        os.fsync(stream.fileno())
    return FileRecord(len(part), digest.hexdigest())


class _Pace:
    """Lets a write in the background rest between its pieces; only one of them goes on in its process."""

    def __init__(self, hurry: Callable[[], bool]) -> None:
        self._hurry, self._done = hurry, 0
        self._begun, self._worked = time.monotonic(), time.process_time()

    def rest(self, count: int) -> None:
        """Sleep in proportion to what the last `count` bytes have taken, while there is no hurry."""
        self._done += count
        if not self._hurry():
            took, worked = time.monotonic() - self._begun, time.process_time() - self._worked
            times = min(1.0 + self._done / _SMALL_BYTES, _LONGEST)
            time.sleep(times * min(_REST * took, _REST_OF_WORK * worked))
        self._begun, self._worked = time.monotonic(), time.process_time()


class _Target:
    """A new file that takes what lies from `start` on in the file behind `source`, piece by piece."""

    def __init__(self, path: Path, descriptor: int, source: int, start: int) -> None:
        self._descriptor, self._source, self._start = descriptor, source, start
        self._done = 0
        self._flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        self._direct = start % _BLOCK_BYTES == 0 and _takes_direct(path)
        if self._direct:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, self._flags | os.O_DIRECT)

    def take(self, chunk: memoryview) -> None:
        """Bring the next bytes to the disk, or on their way to it."""
        taken = self._write_direct(chunk) if self._direct else 0
        while taken < len(chunk):
            sent = _send(self._descriptor, self._source, self._start + self._done + taken, chunk[taken:])
            space.write_back(self._descriptor, self._done + taken, sent)
            taken += sent
        self._done += taken

    def _write_direct(self, chunk: memoryview) -> int:
        """Write whole blocks past the kernel's cache and return how many bytes went; the rest can't go so."""
        taken, whole = 0, len(chunk) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            while taken < whole and taken % _BLOCK_BYTES == 0:
                taken += os.write(self._descriptor, chunk[taken:whole])
        except OSError as error:
            if error.errno != errno.EINVAL:  # That one means: not here, not in this way.
                raise
        if taken < len(chunk):
            self._direct = False
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags)
        return taken


def _takes_direct(path: Path) -> bool:
    """Tell whether `path` is on a file system of a local disk that is known to write well past the cache."""
    device = path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        # A folder's name may be of any bytes; the kernel writes only blanks and ends of lines in another way.
        mounts = _MOUNTS.read_text(encoding="latin-1").split("\n")
    except OSError:
        return False
    lines = (line.split(" ") for line in mounts if line)
    return any(fields[2] == name and fields[fields.index("-") + 1] in _DIRECT for fields in lines)


def _send(target: int, source: int, start: int, chunk: memoryview) -> int:
    """Copy some bytes at least, on file systems that the kernel does not copy to by a plain write."""
    try:
        sent = os.sendfile(target, source, start, len(chunk))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        sent = os.write(target, chunk)
    if sent == 0:
        raise OSError(errno.EIO, "The memory that holds the state has become shorter")
    return sent


@contextmanager
def _beside(do: Callable[[], object]) -> Iterator[None]:
    """Run `do` in a second thread while the body runs, to its end; what it raises is raised here."""
    with ThreadPoolExecutor(1) as executor:
        done = executor.submit(do)
        yield
        done.result()


class HashedReader:
    """Reads a file once, front to back, keeping count and hash of what has passed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = Digest()
        self._size = 0

    def readinto(self, buffer: memoryview) -> None:
        """Fill `buffer`; raises CheckpointError when the file ends before."""
        for chunk in _chunks([buffer]):
            filled = 0
            while filled < len(chunk):
                count = self._stream.readinto(chunk[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError("The file ends too early.")
                filled += count
            self._digest.update(chunk)
            self._size += filled

    def rest(self) -> bytes:
        """Return all bytes that have not been read yet."""
        data = self._stream.read()
        self._digest.update(data)
        self._size += len(data)
        return data

    def drain(self) -> None:
        """Hash the rest of the file without keeping it."""
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
    """Return size and hash of a file as it is on the disk now."""
    with open_hashed(path) as reader:
        reader.drain()
        return reader.record()


def write_small(path: Path, text: str) -> None:
    """Replace `path` by a file with `text`: readers and power cuts see the old one or the new one."""
    with replacing(path) as stream:
        stream.write(text.encode())
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders; their renames are durable by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _chunks(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            yield part[start : start + CHUNK_BYTES]
