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

from slurmddp.errors import CheckpointError
from slurmddp.runs import room

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
_HASH_PART, _DIRECT_PART, _COPY_PART = 1 / 5, 1 / 3, 1 / 2
"""What a thread takes of a processor's time beside a training: more where the disk would have to wait for it.
What the kernel copies costs several times the work of what goes past its cache."""
_SMALL_BYTES, _LONGEST = 64 << 20, 4
"""Rests become longer by their first length with each so many bytes, up to so many times that. What a write
costs the training goes with its bytes, so it is to be spread; but a small state should be on the disk as soon
as one that is saved without rests, and `torch.save` takes longer by the byte for large ones."""


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
        room.reserve(stream.fileno(), expected, path.parent)
        for chunk in _chunks(parts):
            stream.write(chunk)
            room.write_back(stream.fileno(), size, len(chunk))
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
    elsewhere the kernel copies from file to file. This process has no part in either, and hashes meanwhile.
    As long as there is no `hurry`, which is asked again and again, it leaves the processors to others.
    """
    with path.open("xb", buffering=0) as stream:
        room.reserve(stream.fileno(), len(part), path.parent)
        digest = Digest()
        with _beside(partial(_transfer, path, stream.fileno(), source, start, part, hurry)):
            pace = _Pace(_HASH_PART, hurry)
            for chunk in _chunks([part]):
                digest.update(chunk)
                pace.rest(len(chunk))
    return FileRecord(len(part), digest.hexdigest())


class _Pace:
    """Keeps the thread that makes it to a `share` of a processor's time; that of the disk is not counted."""

    def __init__(self, share: float, hurry: Callable[[], bool]) -> None:
        self._share, self._hurry = share, hurry
        self._done, self._begun = 0, time.thread_time()

    def rest(self, count: int) -> None:
        """Sleep in proportion to the work since the last time, `count` bytes, while there is no hurry."""
        self._done += count
        if not self._hurry():
            times = min(1 + self._done // _SMALL_BYTES, _LONGEST)
            time.sleep((time.thread_time() - self._begun) * (1 / self._share - 1) * times)
        self._begun = time.thread_time()


def _transfer(
    path: Path, target: int, source: int, start: int, part: memoryview, hurry: Callable[[], bool]
) -> None:
    """Bring `part` to the disk."""
    direct = start % _BLOCK_BYTES == 0 and _takes_direct(path)
    done = _write_direct(target, part, _Pace(_DIRECT_PART, hurry)) if direct else 0
    pace = _Pace(_COPY_PART, hurry)
    while done < len(part):
        sent = _send(target, source, start + done, part[done : done + CHUNK_BYTES])
        room.write_back(target, done, sent)
        done += sent
        pace.rest(sent)
    os.fsync(target)


def _write_direct(target: int, part: memoryview, pace: _Pace) -> int:
    """Write whole blocks past the kernel's cache and return how many bytes went; the rest is the caller's."""
    done, whole = 0, len(part) // _BLOCK_BYTES * _BLOCK_BYTES
    flags = fcntl.fcntl(target, fcntl.F_GETFL)
    try:
        fcntl.fcntl(target, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < whole and done % _BLOCK_BYTES == 0:
            written = os.write(target, part[done : min(whole, done + CHUNK_BYTES)])
            done += written
            pace.rest(written)
    except OSError as error:
        if error.errno != errno.EINVAL:  # That one means: not here, not in this way.
            raise
    finally:
        fcntl.fcntl(target, fcntl.F_SETFL, flags)
    return done


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
    temporary = path.with_name(f".writing-{path.name}-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
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
