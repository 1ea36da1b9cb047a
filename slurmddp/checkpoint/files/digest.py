"""Compute the sizes and digests of checkpoint files, also while a file is read for another purpose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from slurmddp.errors import CheckpointError

CHUNK_BYTES = 4 << 20
"""Bytes of a piece that is read, written or hashed at once."""

ALGORITHM = "xxh3_128"
"""Name of the digest in manifests. The digest detects damage, not forgery: whoever can change the files can
also change the manifest. So it was chosen for speed (`benchmarks/checkpoint_hash.py`)."""

Digest = xxhash.xxh3_128


@dataclass(frozen=True)
class FileRecord:
    """The record of a file in a manifest: its size in bytes and its digest."""

    size: int
    digest: str


def chunks(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            yield part[start : start + CHUNK_BYTES]


class HashedReader:
    """Reader of a file in a single pass; it computes the size and the digest of all bytes that it reads."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = Digest()
        self._size = 0

    def readinto(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes of the file, and hash them.

        Raises:
            CheckpointError: the file ends before the buffer is full.
        """
        for chunk in chunks([buffer]):
            filled = 0
            # A read may return fewer bytes than requested.
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
        """Return the size and the digest of the bytes that were read so far."""
        return FileRecord(self._size, self._digest.hexdigest())


@contextmanager
def open_hashed(path: Path) -> Iterator[HashedReader]:
    """Open a file and yield a `HashedReader` of it."""
    with path.open("rb", buffering=0) as stream:
        yield HashedReader(stream)


def record_of(path: Path) -> FileRecord:
    """Read a file and return its size and digest."""
    with open_hashed(path) as reader:
        reader.drain()
        return reader.record()
