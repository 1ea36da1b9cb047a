"""Durable files: written, hashed and flushed to the disk, with the hash taken beside the write."""

from __future__ import annotations

import errno
import hashlib
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slurmddp.errors import CheckpointError
from slurmddp.runs import room

CHUNK_BYTES = 8 << 20
_INLINE_BYTES = 1 << 18
"""Handing less than this to the hashing thread costs more than hashing it."""
_MOST_BEHIND = 32
"""So many chunks may wait for the hash, which goes on during the fsync; copies from a GPU stay that long."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and digest of one file, as the manifest keeps them."""

    size: int
    digest: str


class Digest:
    """Tells damage from what was written: the SHA-256 over the CRC-32 of every 8 MiB of a file.

    CRC-32 finds any three flipped bits, and any burst of up to 32, in so many bytes. SHA-256 over all of them
    would guard against intent as well, but whoever can change these files can change the manifest too; and on
    a fast disk it takes as long as the save itself (`benchmarks/checkpoint_hash.py`).
    """

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._crc = self._filled = 0

    def update(self, data: memoryview | bytes) -> None:
        """Take in what follows; how it is cut into pieces does not matter."""
        view = memoryview(data)
        while len(view):
            piece = view[: CHUNK_BYTES - self._filled]
            self._crc = zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == CHUNK_BYTES:
                self._whole.update(self._crc.to_bytes(4, "little"))
                self._crc = self._filled = 0

    def hexdigest(self) -> str:
        whole = self._whole.copy()
        if self._filled:
            whole.update(self._crc.to_bytes(4, "little"))
        return whole.hexdigest()


def write_hashed(path: Path, parts: Iterable[memoryview], *, expected: int = 0) -> FileRecord:
    """Write a new file and flush it to the disk; a second thread hashes the parts meanwhile.

    Raises NoRoomError before the first byte when `expected` bytes are more than disk or quota have left.
    """
    digest = Digest()
    size = 0
    with path.open("xb", buffering=1 << 20) as stream, ThreadPoolExecutor(1) as hasher:
        room.reserve(stream.fileno(), expected, path.parent)
        behind: deque[Future[None]] = deque()
        for chunk in _chunks(parts):
            if behind and behind[0].done():
                behind.popleft().result()
            if len(behind) > _MOST_BEHIND:
                behind.popleft().result()
            if behind or len(chunk) >= _INLINE_BYTES:  # Parts are hashed in their order.
                behind.append(hasher.submit(digest.update, chunk))
            else:
                digest.update(chunk)
            stream.write(chunk)
            size += len(chunk)
        stream.flush()
        os.fsync(stream.fileno())
        for hashed in behind:
            hashed.result()
    return FileRecord(size, digest.hexdigest())


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
