"""The operations of a client of NFS, without a mount: two clients of one folder, each on the test's clock."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmddp.sandbox.nfs_client import NOW_NS, OMIT_NS, NfsClient
from slurmddp.sandbox.nfs_rules import AttributeCache, MountOptions

CREATE = os.O_RDWR | os.O_CREAT
APPEND = os.O_RDWR | os.O_APPEND


class Host:
    """A client, and what a process of its host does."""

    def __init__(self, folder: Path, options: MountOptions, clock: Callable[[], float]) -> None:
        cache = AttributeCache(options, lambda path: os.lstat(f"{folder}{path}"), clock)
        self.client = NfsClient(str(folder), options, cache)

    def open(self, path: str, flags: int = os.O_RDWR) -> SimpleNamespace:
        info = SimpleNamespace(flags=flags, fh=0, direct_io=False, keep_cache=False)
        if flags & os.O_CREAT:
            self.client.create(path, 0o644, info)
        else:
            self.client.open(path, info)
        return info

    def close(self, path: str, info: SimpleNamespace) -> None:
        self.client.flush(path, info)
        self.client.release(path, info)

    def write(self, path: str, data: bytes, flags: int = CREATE) -> None:
        info = self.open(path, flags)
        self.client.write(path, data, 0, info)
        self.close(path, info)

    def read(self, path: str) -> bytes:
        info = self.open(path, os.O_RDONLY)
        data = self.client.read(path, 1000, 0, info)
        self.close(path, info)
        return data

    def size(self, path: str) -> int:
        return self.client.getattr(path)["st_size"]

    def exists(self, path: str) -> bool:
        try:
            self.client.getattr(path)
        except FileNotFoundError:
            return False
        return True

    def names(self, path: str = "/") -> set[str]:
        self.client.opendir(path)
        return {name for name, _, _ in self.client.readdir(path, 0)} - {".", ".."}


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def hosts(tmp_path: Path, clock: list[float]) -> tuple[Host, Host]:
    options = MountOptions(writeback=0)
    return Host(tmp_path, options, lambda: clock[0]), Host(tmp_path, options, lambda: clock[0])


def test_written_data_reach_the_server_at_the_close(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    writer, reader = hosts
    info = writer.open("/file", CREATE)
    writer.client.write("/file", b"data", 0, info)
    assert (tmp_path / "file").read_bytes() == b""
    writer.close("/file", info)
    assert reader.read("/file") == b"data"


def test_written_data_reach_the_server_at_a_sync(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    writer, _ = hosts
    info = writer.open("/file", CREATE)
    writer.client.write("/file", b"data", 0, info)
    writer.client.fsync("/file", 0, info)
    assert (tmp_path / "file").read_bytes() == b"data"


def test_written_data_reach_the_server_when_their_host_looks_at_the_attributes(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    writer, _ = hosts
    info = writer.open("/file", CREATE)
    writer.client.write("/file", b"data", 0, info)
    assert writer.size("/file") == 4
    assert (tmp_path / "file").read_bytes() == b"data"


def test_written_data_reach_the_server_after_a_time(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    writer, _ = hosts
    info = writer.open("/file", CREATE)
    writer.client.write("/file", b"data", 0, info)
    writer.client.write_back_old()
    assert (tmp_path / "file").read_bytes() == b"data"


def test_young_data_wait(tmp_path: Path) -> None:
    writer = Host(tmp_path, MountOptions(writeback=3600), lambda: 0.0)
    info = writer.open("/file", CREATE)
    writer.client.write("/file", b"data", 0, info)
    writer.client.write_back_old()
    assert (tmp_path / "file").read_bytes() == b""


def test_a_megabyte_is_written_without_a_close(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    writer, _ = hosts
    info = writer.open("/file", CREATE)
    for number in range(3):
        writer.client.write("/file", bytes(2**20), number * 2**20, info)
    assert (tmp_path / "file").stat().st_size == 2 * 2**20


def test_writes_at_other_places_keep_their_order(hosts: tuple[Host, Host]) -> None:
    writer, reader = hosts
    info = writer.open("/file", CREATE)
    for data, offset in ((b"aaaa", 0), (b"bb", 1), (b"c", 6)):
        writer.client.write("/file", data, offset, info)
    writer.close("/file", info)
    assert reader.read("/file") == b"abba\0\0c"


def test_a_host_reads_what_it_has_written(hosts: tuple[Host, Host]) -> None:
    writer, _ = hosts
    info = writer.open("/file", CREATE)
    writer.client.write("/file", b"data", 0, info)
    assert writer.client.read("/file", 100, 0, info) == b"data"
    other = writer.open("/file", APPEND)
    writer.client.write("/file", b"longer", 0, info)
    writer.client.write("/file", b"end", 0, other)
    assert writer.read("/file") == b"longerend"


def test_a_file_that_another_client_has_removed_is_stale(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    writer, _ = hosts
    writer.write("/file", b"data")
    info = writer.open("/file")
    (tmp_path / "file").unlink()
    with pytest.raises(OSError, match="Stale file handle") as caught:
        writer.client.read("/file", 100, 0, info)
    assert caught.value.errno == errno.ESTALE
    writer.client.write("/file", b"more", 0, info)
    with pytest.raises(OSError, match="Stale file handle"):
        writer.client.flush("/file", info)
    writer.client.flush("/file", info)


def test_a_write_raises_the_error_of_the_data_before(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    writer, _ = hosts
    info = writer.open("/file", CREATE)
    writer.client.write("/file", b"data", 0, info)
    (tmp_path / "file").unlink()
    writer.client.write_back_old()
    with pytest.raises(OSError, match="Stale file handle"):
        writer.client.write("/file", b"more", 4, info)


def test_data_after_the_last_flush_reach_the_server(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The kernel writes mapped memory back after the close of its file."""
    writer, _ = hosts
    info = writer.open("/file", CREATE)
    writer.client.flush("/file", info)
    writer.client.write("/file", b"data", 0, info)
    writer.client.release("/file", info)
    assert (tmp_path / "file").read_bytes() == b"data"


def test_an_open_file_is_stale_once_its_attributes_are_asked_for(
    hosts: tuple[Host, Host], tmp_path: Path, clock: list[float]
) -> None:
    writer, _ = hosts
    writer.write("/file", b"data")
    info = writer.open("/file")
    (tmp_path / "file").unlink()
    assert writer.client.getattr("/file", info)["st_size"] == 4
    clock[0] = 3
    with pytest.raises(OSError, match="Stale file handle"):
        writer.client.getattr("/file", info)


def test_a_file_with_another_name_left_is_not_stale(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    writer, _ = hosts
    writer.write("/file", b"data")
    info = writer.open("/file")
    (tmp_path / "file").rename(tmp_path / "other")
    assert writer.client.read("/file", 100, 0, info) == b"data"


def test_an_append_goes_to_the_end_on_the_server(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.write("/log", b"one\n")
    infos = [host.open("/log", APPEND) for host in hosts]
    assert all(info.direct_io for info in infos)
    for host, info, data in ((one, infos[0], b"two\n"), (other, infos[1], b"three\n")):
        host.client.write("/log", data, 0, info)
        host.client.flush("/log", info)
    assert one.read("/log") == b"one\ntwo\nthree\n"


def test_appends_of_two_clients_at_once_overwrite_each_other(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.write("/log", b"")
    infos = [host.open("/log", APPEND) for host in hosts]
    one.client.write("/log", b"one\n", 0, infos[0])
    other.client.write("/log", b"two\n", 0, infos[1])
    one.client.flush("/log", infos[0])
    other.client.flush("/log", infos[1])
    assert one.read("/log") == b"two\n"


def test_a_lock_holds_between_clients_and_shows_what_was_written_under_it(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.write("/log", b"")
    infos = [host.open("/log", APPEND) for host in hosts]
    one.client.flock("/log", infos[0], fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        other.client.flock("/log", infos[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert other.size("/log") == 0
    one.client.write("/log", b"one\n", 0, infos[0])
    one.client.flock("/log", infos[0], fcntl.LOCK_UN)
    assert other.size("/log") == 0, "remembered for three seconds"
    other.client.flock("/log", infos[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert other.client.getattr("/log", infos[1])["st_size"] == 4


def test_a_close_ends_a_lock(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.write("/log", b"")
    infos = [host.open("/log") for host in hosts]
    one.client.flock("/log", infos[0], fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        other.client.flock("/log", infos[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    one.close("/log", infos[0])
    other.client.flock("/log", infos[1], fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_kernel_keeps_the_data_of_a_file_that_has_not_changed(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = hosts
    monkeypatch.setattr("slurmddp.sandbox.nfs_rules.CLOCK_TICK_NS", 0)
    writer.write("/file", b"data")
    assert not reader.open("/file", os.O_RDONLY).keep_cache
    assert reader.open("/file", os.O_RDONLY).keep_cache
    writer.write("/file", b"longer data", os.O_RDWR)
    assert not reader.open("/file", os.O_RDONLY).keep_cache


def test_an_open_shows_the_size_and_the_data_of_now(hosts: tuple[Host, Host]) -> None:
    reader, writer = hosts
    writer.write("/file", b"old")
    assert reader.size("/file") == 3
    writer.write("/file", b"longer", os.O_RDWR)
    assert reader.size("/file") == 3
    assert reader.read("/file") == b"longer"
    assert reader.size("/file") == 6


def test_an_open_of_a_file_that_is_gone_shows_that_it_is_gone(hosts: tuple[Host, Host]) -> None:
    reader, writer = hosts
    writer.write("/file", b"old")
    assert reader.exists("/file")
    writer.client.unlink("/file")
    assert reader.exists("/file")
    with pytest.raises(FileNotFoundError):
        reader.read("/file")
    assert not reader.exists("/file")


def test_a_listing_shows_a_file_of_another_host_and_ends_the_memory_that_it_was_missing(
    hosts: tuple[Host, Host],
) -> None:
    reader, writer = hosts
    assert not reader.exists("/file")
    writer.write("/file", b"data")
    assert not reader.exists("/file")
    assert reader.names() == {"file"}
    assert reader.exists("/file")


def test_a_listing_has_inodes_and_types(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    host, _ = hosts
    host.client.mkdir("/folder", 0o755)
    ((_, attributes, _),) = [entry for entry in host.client.readdir("/", 0) if entry[0] == "folder"]
    assert stat.S_ISDIR(attributes["st_mode"])
    assert attributes["st_ino"] == (tmp_path / "folder").stat().st_ino


def test_own_changes_of_names_are_seen_at_once(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    for name in ("/file", "/link", "/other", "/folder", "/pipe", "/copy"):
        assert not host.exists(name)
    host.write("/file", b"data")
    host.client.symlink("/link", "file")
    host.client.link("/copy", "/file")
    host.client.mkdir("/folder", 0o755)
    host.client.mknod("/pipe", stat.S_IFIFO | 0o644, 0)
    assert host.names() == {"file", "link", "copy", "folder", "pipe"}
    assert all(host.exists(f"/{name}") for name in host.names())
    assert host.client.readlink("/link") == "file"
    assert host.client.getattr("/file")["st_nlink"] == 2

    host.client.rename("/file", "/other")
    host.client.rmdir("/folder")
    host.client.unlink("/pipe")
    assert not any(host.exists(name) for name in ("/file", "/folder", "/pipe"))
    assert host.read("/other") == b"data"


def test_a_rename_replaces_an_open_file_whose_readers_lose_it(
    hosts: tuple[Host, Host],
) -> None:
    reader, writer = hosts
    writer.write("/latest", b"old")
    writer.write("/latest.tmp", b"newer")
    info = reader.open("/latest", os.O_RDONLY)
    writer.client.rename("/latest.tmp", "/latest")
    with pytest.raises(OSError, match="Stale file handle"):
        reader.client.read("/latest", 100, 0, info)
    assert reader.read("/latest") == b"newer"


def test_a_renamed_open_file_gets_its_data(hosts: tuple[Host, Host]) -> None:
    writer, reader = hosts
    info = writer.open("/file", CREATE)
    writer.client.write("/file", b"data", 0, info)
    writer.client.rename("/file", "/other")
    assert writer.size("/other") == 4
    writer.client.write("/other", b"more", 4, info)
    writer.client.write_back_old()
    assert writer.size("/other") == 8
    assert reader.read("/other") == b"datamore"


def test_sizes_are_cut_and_space_is_reserved(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    info = host.open("/file", CREATE)
    host.client.write("/file", b"long data", 0, info)
    host.client.truncate("/file", 4, info)
    assert host.client.getattr("/file", info)["st_size"] == 4
    host.client.truncate("/file", 2)
    assert host.size("/file") == 2
    host.client.fallocate("/file", 0, 0, 100, info)
    assert host.size("/file") == 100
    with pytest.raises(OSError, match="not supported"):
        host.client.fallocate("/file", 1, 0, 200, info)


def test_times_modes_and_owners_are_set(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    host, _ = hosts
    host.write("/file", b"data")
    host.client.utimens("/file", (1_000_000_007, 2_000_000_009))
    host.client.utimens("/file", (NOW_NS, OMIT_NS))
    host.client.chmod("/file", 0o600)
    host.client.chown("/file", os.getuid(), os.getgid())
    attributes = host.client.getattr("/file")
    assert attributes["st_mtime"] == 2_000_000_009
    assert attributes["st_atime"] > 1e18
    assert stat.S_IMODE(attributes["st_mode"]) == 0o600
    host.client.utimens("/file")
    assert host.client.getattr("/file")["st_mtime"] > 1e18


def test_setting_the_times_of_a_folder_shows_what_other_hosts_have_created(hosts: tuple[Host, Host]) -> None:
    reader, writer = hosts
    assert not reader.exists("/file")
    writer.write("/file", b"data")
    assert not reader.exists("/file")
    reader.client.utimens("/")
    assert reader.exists("/file")


def test_a_folder_is_synced_and_has_space(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    assert host.client.fsyncdir("/", 0, 0) == 0
    assert host.client.statfs("/")["f_bsize"] > 0


def test_an_exclusive_creation_asks_the_server(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    assert not one.exists("/lock")
    other.write("/lock", b"")
    with pytest.raises(FileExistsError):
        one.open("/lock", CREATE | os.O_EXCL)
    assert one.exists("/lock")
