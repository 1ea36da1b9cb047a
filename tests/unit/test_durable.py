"""A file that the kernel copies out of memory: its bytes, its digest, its flush, its errors."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from slurmddp.runs.durable import CHUNK_BYTES, FileRecord, copy_hashed, record_of

START, SIZE = 100, CHUNK_BYTES + 777


@pytest.fixture
def source() -> Iterator[int]:
    descriptor = os.memfd_create("source")
    os.write(descriptor, os.urandom(START + SIZE + 50))
    yield descriptor
    os.close(descriptor)


def copied(path: Path, source: int) -> tuple[FileRecord, bytes]:
    part = memoryview(mmap.mmap(source, 0, prot=mmap.PROT_READ))[START : START + SIZE]
    return copy_hashed(path, source, START, part), bytes(part)


def test_the_bytes_that_were_asked_for_arrive_and_are_hashed(tmp_path: Path, source: int) -> None:
    record, data = copied(tmp_path / "file", source)
    assert (tmp_path / "file").read_bytes() == data
    assert record == record_of(tmp_path / "file") == FileRecord(SIZE, xxhash.xxh3_128_hexdigest(data))


def test_where_the_kernel_does_not_copy_the_bytes_are_written(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(os, "sendfile", refuse)
    record, data = copied(tmp_path / "file", source)
    assert (tmp_path / "file").read_bytes() == data
    assert record == record_of(tmp_path / "file")


@pytest.mark.parametrize("call", ["sendfile", "fsync"])
def test_what_the_disk_refuses_is_raised(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="broken"):
        copied(tmp_path / "file", source)


def test_memory_that_is_shorter_than_told_is_an_error(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    with pytest.raises(OSError, match="shorter"):
        copied(tmp_path / "file", source)
