"""Each rule of nfs(5) on what a client remembers, on a server and a clock of the test."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from slurmddp.errors import ConfigError
from slurmddp.sandbox.nfs_rules import AttributeCache, MountOptions, parse_options


class Server:
    """Files and folders with their attributes; each change has a time stamp of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.questions: list[str] = []
        self._changes = 0
        self._attributes: dict[str, os.stat_result] = {}
        self.change("/", is_folder=True)

    def __call__(self, path: str) -> os.stat_result:
        self.questions.append(path)
        if path not in self._attributes:
            raise FileNotFoundError(path)
        return self._attributes[path]

    def change(self, path: str, size: int = 1, *, is_folder: bool = False, at_ns: int | None = None) -> None:
        """Create a path, or give it other attributes."""
        self._changes += 1
        inode = self._attributes[path].st_ino if path in self._attributes else self._changes
        is_new = path not in self._attributes
        mode = (stat.S_IFDIR if is_folder else stat.S_IFREG) | 0o755
        changed_ns = self._changes if at_ns is None else at_ns
        self._attributes[path] = os.stat_result(
            (mode, inode, 0, 1, 0, 0, size, 0, 0, 0), {"st_mtime_ns": changed_ns, "st_ctime_ns": changed_ns}
        )
        folder = str(Path(path).parent)
        if is_new and path != folder:
            self.change(folder, is_folder=True)

    def remove(self, path: str) -> None:
        del self._attributes[path]
        self.change(str(Path(path).parent), is_folder=True)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def cache(server: Server) -> AttributeCache:
    return AttributeCache(MountOptions(), server, lambda: server.now)


def exists(cache: AttributeCache, path: str) -> bool:
    try:
        cache.attributes(path)
    except FileNotFoundError:
        return False
    return True


def moment_of(server: Server, condition: Callable[[], bool]) -> float:
    """Return the seconds after which a condition that is asked for each second holds."""
    begin = server.now
    while not condition():
        server.now += 1
        assert server.now < begin + 1000
    return server.now - begin


def test_a_missing_name_stays_missing_while_the_attributes_of_its_folder_are_valid(
    server: Server, cache: AttributeCache
) -> None:
    assert not exists(cache, "/late")
    server.change("/late")
    assert moment_of(server, lambda: exists(cache, "/late")) == 30


def test_a_name_stays_until_the_attributes_of_its_file_are_asked_for(
    server: Server, cache: AttributeCache
) -> None:
    server.change("/gone")
    assert exists(cache, "/gone")
    server.remove("/gone")
    assert moment_of(server, lambda: not exists(cache, "/gone")) == 3


def test_a_removed_folder_stays_for_the_time_of_a_folder(server: Server, cache: AttributeCache) -> None:
    server.change("/gone", is_folder=True)
    assert exists(cache, "/gone")
    server.remove("/gone")
    assert moment_of(server, lambda: not exists(cache, "/gone")) == 30


def test_a_grown_file_shows_its_size_after_the_time_of_a_file(server: Server, cache: AttributeCache) -> None:
    server.change("/log", size=1)
    assert cache.attributes("/log").st_size == 1
    server.change("/log", size=2)
    assert moment_of(server, lambda: cache.attributes("/log").st_size == 2) == 3


def test_the_time_doubles_while_nothing_changes_and_starts_anew_with_a_change(
    server: Server, cache: AttributeCache
) -> None:
    server.change("/log")
    asked_at = []
    for second in range(400):
        server.now = second
        if second == 300:
            server.change("/log", size=2)
        before = server.questions.count("/log")
        cache.attributes("/log")
        if server.questions.count("/log") > before:
            asked_at.append(second)
    waits = [after - before for before, after in pairwise(asked_at)]
    assert waits[:8] == [3, 6, 12, 24, 48, 60, 60, 60]
    assert asked_at[8] == 273
    assert waits[8:] == [60, 3, 6, 12, 24], "the answer at 333 shows the change"


def test_the_time_of_a_folder_has_a_limit_of_its_own(server: Server) -> None:
    cache = AttributeCache(parse_options("acdirmax=45"), server, lambda: server.now)
    asked_at = []
    for second in range(200):
        server.now = second
        before = server.questions.count("/")
        exists(cache, "/absent")
        if server.questions.count("/") > before:
            asked_at.append(second)
    assert asked_at == [0, 30, 75, 120, 165]


def test_an_answer_in_the_meantime_does_not_double_the_time(server: Server, cache: AttributeCache) -> None:
    server.change("/log")
    assert exists(cache, "/log")
    for _ in range(5):
        cache.ask("/log")
    server.change("/log", size=2)
    assert moment_of(server, lambda: cache.attributes("/log").st_size == 2) == 3


def test_opening_a_folder_asks_the_server_and_forgets_its_names(
    server: Server, cache: AttributeCache
) -> None:
    assert not exists(cache, "/late")
    server.change("/late")
    cache.ask("/")
    assert exists(cache, "/late")


def test_opening_a_folder_that_has_not_changed_keeps_its_names(server: Server, cache: AttributeCache) -> None:
    assert not exists(cache, "/late")
    cache.ask("/")
    questions = len(server.questions)
    assert not exists(cache, "/late")
    assert len(server.questions) == questions


def test_a_folder_that_changed_a_moment_ago_may_change_within_the_same_time_stamp(
    server: Server, cache: AttributeCache
) -> None:
    stamp = time.time_ns()
    server.change("/", is_folder=True, at_ns=stamp)
    assert not exists(cache, "/late")
    server.change("/late")
    server.change("/", is_folder=True, at_ns=stamp)
    cache.ask("/")
    assert exists(cache, "/late")


def test_an_own_change_keeps_the_other_names_of_the_folder(server: Server, cache: AttributeCache) -> None:
    assert not exists(cache, "/late")
    with cache.changing("/own", exists=True):
        server.change("/own")
    assert exists(cache, "/own")
    server.change("/late")
    assert moment_of(server, lambda: exists(cache, "/late")) == 30


def test_an_own_change_shows_that_another_host_has_changed_the_folder(
    server: Server, cache: AttributeCache
) -> None:
    assert not exists(cache, "/late")
    server.change("/late")
    with cache.changing("/own", exists=True):
        server.change("/own")
    assert exists(cache, "/late")


def test_a_refused_change_shows_that_the_folder_has_changed(server: Server, cache: AttributeCache) -> None:
    assert not exists(cache, "/late")
    server.change("/late")
    with pytest.raises(FileExistsError), cache.changing("/late", exists=True):
        raise FileExistsError
    assert exists(cache, "/late")


def test_an_own_removal_is_seen_at_once(server: Server, cache: AttributeCache) -> None:
    server.change("/own")
    assert exists(cache, "/own")
    with cache.changing("/own", exists=False):
        server.remove("/own")
    assert not exists(cache, "/own")


def test_a_renamed_folder_takes_what_is_remembered_below_it_along(
    server: Server, cache: AttributeCache
) -> None:
    server.change("/old", is_folder=True)
    server.change("/old/file", size=1)
    assert exists(cache, "/old/file")
    with cache.changing("/old", exists=False):
        server.remove("/old/file")
        server.remove("/old")
    server.change("/old", is_folder=True)
    server.change("/old/file", size=2)
    cache.ask("/")
    assert cache.attributes("/old/file").st_size == 2


def test_setting_the_times_of_a_folder_forgets_its_names(server: Server, cache: AttributeCache) -> None:
    assert not exists(cache, "/late")
    server.change("/late")
    cache.forget("/")
    assert exists(cache, "/late")


def test_an_open_file_has_its_own_attributes_after_another_has_taken_its_name(
    server: Server, cache: AttributeCache
) -> None:
    server.change("/name", size=1)
    opened = cache.attributes("/name")
    server.remove("/name")
    server.change("/name", size=2)
    cache.ask("/name")
    assert cache.attributes_of_open("/name", opened.st_ino, lambda: opened).st_size == 1
    assert cache.attributes("/name").st_size == 2


def test_the_attributes_of_an_open_file_are_remembered_as_well(server: Server, cache: AttributeCache) -> None:
    server.change("/log", size=1)
    inode = cache.attributes("/log").st_ino
    server.change("/log", size=2)
    assert (
        moment_of(
            server,
            lambda: cache.attributes_of_open("/log", inode, lambda: server("/log")).st_size == 2,
        )
        == 3
    )


def test_the_answer_about_an_open_file_is_remembered(server: Server, cache: AttributeCache) -> None:
    server.change("/log")
    inode = cache.attributes("/log").st_ino
    server.now = 3
    cache.attributes_of_open("/log", inode, lambda: server("/log"))
    questions = len(server.questions)
    cache.attributes_of_open("/log", inode, lambda: server("/log"))
    assert len(server.questions) == questions


@pytest.mark.parametrize(
    ("option", "late_s", "gone_s"), [("all", 30, 30), ("positive", 0, 30), ("none", 0, 0)]
)
def test_lookupcache_chooses_the_names_that_are_remembered(
    server: Server, option: str, late_s: int, gone_s: int
) -> None:
    options = parse_options(f"lookupcache={option},acregmin=500,acregmax=500")
    cache = AttributeCache(options, server, lambda: server.now)
    server.change("/gone")
    assert exists(cache, "/gone")
    assert not exists(cache, "/late")
    server.change("/late")
    server.remove("/gone")
    assert moment_of(server, lambda: exists(cache, "/late")) == late_s
    server.now = 0
    assert moment_of(server, lambda: not exists(cache, "/gone")) <= gone_s


@pytest.mark.parametrize("option", ["noac", "actimeo=0"])
def test_nothing_is_remembered_without_a_cache(server: Server, option: str) -> None:
    cache = AttributeCache(parse_options(option), server, lambda: server.now)
    assert not exists(cache, "/late")
    server.change("/late", size=1)
    assert cache.attributes("/late").st_size == 1
    server.change("/late", size=2)
    assert cache.attributes("/late").st_size == 2
    server.remove("/late")
    assert not exists(cache, "/late")


def test_options_are_read_from_left_to_right() -> None:
    assert parse_options("") == MountOptions()
    assert parse_options("actimeo=5,acdirmax=7,writeback=0.5") == MountOptions(5, 5, 5, 7, "all", 0.5)
    assert parse_options("noac") == MountOptions(0, 0, 0, 0, "all", 0)


@pytest.mark.parametrize(
    "option", ["acdirmin", "acdirmin=x", "acdirmin=-1", "lookupcache=some", "soft", "noac=1"]
)
def test_an_option_that_can_not_be_used_is_named(option: str) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        parse_options(option)
    assert "lookupcache takes all, positive, none" in caught.value.hint
