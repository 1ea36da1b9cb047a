"""Durable files: written, hashed on the way, and flushed to the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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
        with _flushing(stream, beside=held):
            for chunk in unhashed:
                digest.update(chunk)
    return FileRecord(size, digest.hexdigest())


def copy_hashed(path: Path, source: int, start: int, part: memoryview) -> FileRecord:
    """Write `part`, which lies at `start` in the file behind `source`, as `write_hashed` does what is held.

    The kernel copies from file to file: this process need not find each of the pages in its own memory first.
    """
    with path.open("xb", buffering=0) as stream:
        target, done = stream.fileno(), 0
        room.reserve(target, len(part), path.parent)
        while done < len(part):
            chunk = part[done : done + CHUNK_BYTES]
            sent = _send(target, source, start + done, chunk)
            room.write_back(target, done, sent)
            done += sent
        digest = Digest()
        with _flushing(stream, beside=True):
            digest.update(part)
    return FileRecord(done, digest.hexdigest())


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
def _flushing(stream: IO[bytes], *, beside: bool) -> Iterator[None]:
    """Flush a file to the disk, with `beside` by a second thread while the body runs."""
    if not beside:
        yield
        os.fsync(stream.fileno())
        return
    with ThreadPoolExecutor(1) as flusher:
        flushed = flusher.submit(os.fsync, stream.fileno())
        yield
        flushed.result()


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
