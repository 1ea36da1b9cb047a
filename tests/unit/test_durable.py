"""A file that comes out of memory, by the kernel or past its cache: bytes, digest, flush, errors."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from slurmddp.runs import durable
from slurmddp.runs.durable import CHUNK_BYTES, FileRecord, copy_hashed, record_of

START, SIZE = 4096, CHUNK_BYTES + 777


@pytest.fixture
def source() -> Iterator[int]:
    descriptor = os.memfd_create("source")
    os.write(descriptor, os.urandom(START + SIZE + 50))
    yield descriptor
    os.close(descriptor)


@pytest.fixture(params=[True, False], ids=["past the cache", "by the kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(durable, "_takes_direct", lambda path: request.param)
    return "write" if request.param else "sendfile"


def copied(path: Path, source: int, start: int = START) -> tuple[FileRecord, bytes]:
    part = memoryview(mmap.mmap(source, 0, prot=mmap.PROT_READ))[start : start + SIZE]
    return copy_hashed(path, source, start, part), bytes(part)


@pytest.mark.parametrize("start", [START, 100])
def test_the_bytes_that_were_asked_for_arrive_and_are_hashed(
    tmp_path: Path, source: int, way: str, start: int
) -> None:
    record, data = copied(tmp_path / "file", source, start)
    assert (tmp_path / "file").read_bytes() == data
    assert record == record_of(tmp_path / "file") == FileRecord(SIZE, xxhash.xxh3_128_hexdigest(data))


@pytest.mark.parametrize(
    ("kind", "direct"), [("ext4", True), ("xfs", True), ("nfs4", False), ("overlay", False)]
)
def test_only_file_systems_of_local_disks_are_written_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, direct: bool
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:999 / /other rw shared:1 - ext4 /dev/b rw\n"
        f"22 1 {os.major(device)}:{os.minor(device)} / /here rw shared:2 master:1 - {kind} server:/x rw\n"
    )
    monkeypatch.setattr(durable, "_MOUNTS", mounts)
    assert durable._takes_direct(tmp_path) is direct


def test_other_mounts_may_have_names_of_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(
        b"21 1 0:999 / /home/M\xfcller\x85\xa0\x0c/x rw shared:1 - nfs4 server:/y rw\n"
        b"22 1 %d:%d / /here rw - ext4 /dev/b rw\n" % (os.major(device), os.minor(device))
    )
    monkeypatch.setattr(durable, "_MOUNTS", mounts)
    assert durable._takes_direct(tmp_path)


def test_all_whole_blocks_go_past_the_cache(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    send = durable._send
    monkeypatch.setattr(durable, "_takes_direct", lambda path: True)
    monkeypatch.setattr(
        durable, "_send", lambda *words: sent.append((words[2], len(words[3]))) or send(*words)
    )
    copied(tmp_path / "file", source)
    assert sent == [(START + CHUNK_BYTES, 777)]


def test_a_write_past_the_cache_that_ends_within_a_block_goes_on_by_the_kernel(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(descriptor: int, data: memoryview) -> int:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        assert flags & os.O_DIRECT
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return write(descriptor, data[:5000])

    write = os.write
    monkeypatch.setattr(durable, "_takes_direct", lambda path: True)
    monkeypatch.setattr(os, "write", cut_short)
    record, data = copied(tmp_path / "file", source)
    assert (tmp_path / "file").read_bytes() == data
    assert record == record_of(tmp_path / "file")


def test_where_one_way_is_refused_the_bytes_go_the_other_way(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    refused = []

    def refuse(*_: object) -> int:
        refused.append(way)
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(os, way, refuse)
    record, data = copied(tmp_path / "file", source)
    assert refused
    assert (tmp_path / "file").read_bytes() == data
    assert record == record_of(tmp_path / "file")


@pytest.mark.parametrize("call", ["the transfer", "fsync"])
def test_what_the_disk_refuses_is_raised(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch, way: str, call: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, way if call == "the transfer" else call, refuse)
    with pytest.raises(OSError, match="broken"):
        copied(tmp_path / "file", source)


def test_memory_that_is_shorter_than_told_is_an_error(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_takes_direct", lambda path: False)
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    with pytest.raises(OSError, match="shorter"):
        copied(tmp_path / "file", source)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long threads slept that each worked for a second between two looks at their clock."""
    naps: list[float] = []
    clocks: dict[int, int] = {}

    def thread_time() -> int:
        own = threading.get_ident()
        clocks[own] = clocks.get(own, 0) + 1
        return clocks[own]

    monkeypatch.setattr(durable, "time", SimpleNamespace(thread_time=thread_time, sleep=naps.append))
    return naps


def test_each_thread_works_its_part_of_the_time_and_leaves_the_rest(
    tmp_path: Path, source: int, way: str, slept: list[float]
) -> None:
    part = memoryview(mmap.mmap(source, 0, prot=mmap.PROT_READ))[START : START + SIZE]
    copy_hashed(tmp_path / "file", source, START, part, hurry=lambda: False)
    hashed, written = [4.0, 4.0], {"write": [2.0, 1.0], "sendfile": [1.0, 1.0]}
    assert sorted(slept) == pytest.approx(sorted(hashed + written[way]))


@pytest.mark.parametrize(
    ("small_bytes", "hashed", "written"),
    [
        (CHUNK_BYTES + 1, [4.0, 8.0], {"write": [2.0, 1.0], "sendfile": [1.0, 2.0]}),
        (CHUNK_BYTES // 2, [12.0, 12.0], {"write": [6.0, 1.0], "sendfile": [3.0, 3.0]}),
        (1, [16.0, 16.0], {"write": [8.0, 4.0], "sendfile": [4.0, 4.0]}),
    ],
)
def test_rests_become_longer_with_what_is_written(
    tmp_path: Path,
    source: int,
    way: str,
    slept: list[float],
    monkeypatch: pytest.MonkeyPatch,
    small_bytes: int,
    hashed: list[float],
    written: dict[str, list[float]],
) -> None:
    monkeypatch.setattr(durable, "_SMALL_BYTES", small_bytes)
    part = memoryview(mmap.mmap(source, 0, prot=mmap.PROT_READ))[START : START + SIZE]
    copy_hashed(tmp_path / "file", source, START, part, hurry=lambda: False)
    assert sorted(slept) == pytest.approx(sorted(hashed + written[way]))


def test_nothing_rests_once_somebody_is_in_a_hurry(
    tmp_path: Path, source: int, way: str, slept: list[float]
) -> None:
    copied(tmp_path / "waited for", source)
    assert slept == []
    part = memoryview(mmap.mmap(source, 0, prot=mmap.PROT_READ))[START : START + SIZE]
    copy_hashed(tmp_path / "file", source, START, part, hurry=lambda: bool(slept))
    assert len(slept) < 4
