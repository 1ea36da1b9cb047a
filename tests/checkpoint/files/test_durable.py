"""Copies from memory files, by the kernel and by direct writes: bytes, digest, flush, errors, sleeps."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from slurmddp.checkpoint.files import durable, space
from slurmddp.checkpoint.files.digest import CHUNK_BYTES, FileRecord, record_of
from slurmddp.checkpoint.files.durable import copy_hashed
from slurmddp.host import mounts

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


def copied(
    path: Path, source: int, start: int = START, is_urgent: Callable[[], bool] = lambda: True
) -> tuple[FileRecord, bytes]:
    part = memoryview(mmap.mmap(source, 0, prot=mmap.PROT_READ))[start : start + SIZE]
    return copy_hashed(path, source, start, part, is_urgent=is_urgent), bytes(part)


@pytest.mark.parametrize("start", [START, 100])
def test_the_copied_bytes_and_their_digest_are_right(
    tmp_path: Path, source: int, way: str, start: int
) -> None:
    record, data = copied(tmp_path / "file", source, start)
    assert (tmp_path / "file").read_bytes() == data
    assert record == record_of(tmp_path / "file") == FileRecord(SIZE, xxhash.xxh3_128_hexdigest(data))


@pytest.mark.parametrize(
    ("kind", "direct"), [("ext4", True), ("xfs", True), ("nfs4", False), ("overlay", False)]
)
def test_only_local_file_systems_get_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, direct: bool
) -> None:
    device = tmp_path.stat().st_dev
    table = tmp_path / "mountinfo"
    here = f"{os.major(device)}:{os.minor(device)} / /here rw shared:2 master:1 - {kind} server:/x rw\n"
    other = b"21 1 0:999 / /home/M\xfcller\x85\xa0\x0c/x rw shared:1 - ext4 /dev/b rw\n22 1 "
    table.write_bytes(other + here.encode())  # A name may hold any bytes.
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    assert durable._takes_direct(tmp_path) is direct


def test_all_whole_blocks_are_direct_writes(
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


def test_after_a_short_direct_write_the_kernel_copies_the_rest(
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


def test_a_refused_way_of_writing_falls_back_to_the_other(
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
def test_errors_of_the_disk_are_raised(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch, way: str, call: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, way if call == "the transfer" else call, refuse)
    with pytest.raises(OSError, match="broken"):
        copied(tmp_path / "file", source)


def test_a_shortened_memory_file_is_an_error(
    tmp_path: Path, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_takes_direct", lambda path: False)
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    with pytest.raises(OSError, match="shorter"):
        copied(tmp_path / "file", source)


class Clock:
    """A clock on which each piece takes `took` seconds, of which the process works `worked`."""

    def __init__(self, took: float, worked: float) -> None:
        self.took, self.worked = took, worked
        self.naps: list[float] = []
        self._seen = [0, 0]

    def monotonic(self) -> float:
        self._seen[0] += 1
        return self._seen[0] * self.took

    def process_time(self) -> float:
        self._seen[1] += 1
        return self._seen[1] * self.worked

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)


@pytest.mark.parametrize(
    ("ramp_bytes", "times"), [(1 << 40, [1.0, 1.0]), (CHUNK_BYTES * 2, [1.5, 1.5]), (1, [2.0, 2.0])]
)
@pytest.mark.parametrize(
    ("took", "worked", "nap"), [(1.0, 1.0, 1.0), (1.0, 0.25, 0.625)], ids=["a fast disk", "a slow disk"]
)
def test_a_sleep_follows_each_piece_and_is_shorter_on_a_slow_disk(
    tmp_path: Path,
    source: int,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    took: float,
    worked: float,
    nap: float,
    ramp_bytes: int,
    times: list[float],
) -> None:
    monkeypatch.setattr(durable, "_RAMP_BYTES", ramp_bytes)
    monkeypatch.setattr(durable, "time", clock := Clock(took, worked))
    copied(tmp_path / "file", source, is_urgent=lambda: False)
    assert clock.naps == pytest.approx([nap * time for time in times], rel=1e-3)


def test_an_urgent_write_does_not_sleep(
    tmp_path: Path, source: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "time", clock := Clock(1.0, 1.0))
    copied(tmp_path / "waited for", source)
    assert clock.naps == []
    copied(tmp_path / "file", source, is_urgent=lambda: bool(clock.naps))
    assert len(clock.naps) == 1


def test_a_piece_is_on_the_disk_before_the_sleep(
    tmp_path: Path, source: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(durable, "time", clock := Clock(1.0, 1.0))
    monkeypatch.setattr(clock, "sleep", lambda seconds: sizes.append((tmp_path / "file").stat().st_size))
    monkeypatch.setattr(space, "reserve", lambda *words: None)
    copied(tmp_path / "file", source, is_urgent=lambda: False)
    assert sizes == [CHUNK_BYTES, SIZE]
