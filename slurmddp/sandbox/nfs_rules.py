"""Decide which names and attributes of files an NFS client remembers, and for how long.

The rules are those of the Linux client, from nfs(5), sections "Data and metadata coherence" and "Directory
entry caching", and from RFC 1813 and RFC 8881:

- The attributes of a file are remembered for `acregmin` seconds, those of a folder for `acdirmin`. The time
  doubles each time the server reports the same attributes again, up to `acregmax` and `acdirmax`. It starts
  anew when they have changed.
- A name that a look-up found, or did not find, is remembered as long as the folder's attributes are.
  `lookupcache=positive` forgets names that were not found, `lookupcache=none` forgets all.
- Opening a file or a folder asks the server (close-to-open consistency). If a folder has changed, its names
  are forgotten.
- The reply to a change by this client holds the folder's attributes before and after (`wcc_data`,
  `change_info4`). The other names are forgotten if the folder had changed elsewhere before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from slurmddp.errors import ConfigError

LOOKUP_CACHES = ("all", "positive", "none")
CLOCK_TICK_NS = 20_000_000
"""Longest tick of the kernel's clock: two changes of a file within a tick may get equal time stamps."""


@dataclass(frozen=True)
class MountOptions:
    """The options of a mount, with the names and default values of nfs(5)."""

    acregmin: float = 3
    acregmax: float = 60
    acdirmin: float = 30
    acdirmax: float = 60
    lookupcache: str = "all"
    writeback: float = 30
    """Seconds until written data go to the server without a close or fsync; vm.dirty_expire_centisecs."""


def parse_options(text: str) -> MountOptions:
    """Return the options of a mount from a comma-separated list such as `acdirmin=60,lookupcache=none`.

    Besides the fields of `MountOptions`, `actimeo=N` sets all four times of attributes. `noac` sets them to 0
    and sends each write at once.
    """
    options = MountOptions()
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        options = replace(options, **_parse_option(word, name, value))

    return options


def _parse_option(word: str, name: str, value: str) -> dict[str, Any]:
    """Return the fields of `MountOptions` that an option sets; raise ConfigError for an unknown option."""
    attribute_times = ("acregmin", "acregmax", "acdirmin", "acdirmax")
    if word == "noac":
        return {**dict.fromkeys(attribute_times, 0.0), "writeback": 0.0}
    if name == "lookupcache" and value in LOOKUP_CACHES:
        return {name: value}

    with contextlib.suppress(ValueError):
        seconds = float(value)
        if seconds >= 0 and name == "actimeo":
            return dict.fromkeys(attribute_times, seconds)
        if seconds >= 0 and name in (*attribute_times, "writeback"):
            return {name: seconds}

    known = [entry.name for entry in fields(MountOptions)]
    raise ConfigError(
        f"The mount option {word!r} is unknown, or its value can't be used.",
        hint=f"Use noac, or NAME=SECONDS with one of actimeo, {', '.join(known)}; lookupcache takes "
        f"{', '.join(LOOKUP_CACHES)}.",
    )


@dataclass
class _Remembered:
    """The attributes of a file or folder at the time the server reported them."""

    attributes: os.stat_result
    valid_s: float
    asked_at: float
    is_settled: bool
    """Whether every later change gets another time stamp, so that the attributes show it."""
    names: dict[str, bool] = field(default_factory=dict)
    """For a folder: each name that was looked up, and whether it exists."""


class AttributeCache:
    """The attributes and names that one client remembers, by path below the root of the mount.

    Args:
        options: the options of the mount, which decide for how long.
        ask_server: returns the attributes of a path; raises OSError.
        clock: a function that returns the time in seconds since any fixed moment.
    """

    def __init__(
        self,
        options: MountOptions,
        ask_server: Callable[[str], os.stat_result],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._ask_server = ask_server
        self._clock = clock
        self._known: dict[str, _Remembered] = {}
        # The lock is needed because libfuse calls the client from several threads.
        self._lock = threading.RLock()

    def attributes(self, path: str) -> os.stat_result:
        """Return the attributes of a path, from memory while they are valid.

        Raises:
            OSError: the path does not exist, also as far as this client remembers.
        """
        with self._lock:
            exists = self._remembered_name(path)
            if exists is False:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

            if exists and self._is_valid(path):
                return self._known[path].attributes

            return self.ask(path)

    def _remembered_name(self, path: str) -> bool | None:
        """Return whether a name exists, as this client remembers; None if it must ask the server."""
        if path == "/":
            return True

        folder, name = os.path.split(path)
        if not self._is_valid(folder):
            self.ask(folder)

        exists = self._known[folder].names.get(name)
        forgets_found = self._options.lookupcache == "none"
        forgets_missing = self._options.lookupcache != "all"
        if (exists is True and forgets_found) or (exists is False and forgets_missing):
            return None

        return exists

    def _is_valid(self, path: str) -> bool:
        """Return whether the remembered attributes of a path may still be used without the server."""
        known = self._known.get(path)
        return known is not None and self._clock() < known.asked_at + known.valid_s

    def attributes_of_open(self, path: str, inode: int, ask: Callable[[], os.stat_result]) -> os.stat_result:
        """Return the attributes of an open file, from memory while they are valid.

        Args:
            path: the name under which the file was opened.
            inode: the number of the file, because another file may have the name now.
            ask: returns the attributes from the server; raises OSError.
        """
        with self._lock:
            known = self._known.get(path)
            same_file = known is not None and known.attributes.st_ino == inode
            if known is not None and same_file and self._is_valid(path):
                return known.attributes

            attributes = ask()
            if same_file:
                self._remember(path, attributes)
            return attributes

    def ask(self, path: str) -> os.stat_result:
        """Return the attributes of a path from the server, and remember them."""
        with self._lock:
            try:
                attributes = self._ask_server(path)
            except FileNotFoundError:
                self._forget_below(path)
                self._set_name(path, False)
                raise

            self.learn(path, attributes)
            return attributes

    def learn(self, path: str, attributes: os.stat_result) -> bool:
        """Store attributes that came from the server; return whether they differ from the stored ones."""
        with self._lock:
            has_changed = self._remember(path, attributes)
            self._set_name(path, True)
            return has_changed

    def _remember(self, path: str, attributes: os.stat_result) -> bool:
        shortest = self._options.acregmin
        longest = self._options.acregmax
        if stat.S_ISDIR(attributes.st_mode):
            shortest = self._options.acdirmin
            longest = self._options.acdirmax

        before = self._known.get(path)
        is_same = before is not None and before.is_settled and _state(before.attributes) == _state(attributes)
        entry = _Remembered(attributes, shortest, self._clock(), _is_settled(attributes))
        if before is not None and is_same:
            entry.names = before.names
            # The time doubles only when it has passed: an earlier query does not show that it was too short.
            doubling = 1 if self._is_valid(path) else 2
            entry.valid_s = min(before.valid_s * doubling, longest)

        self._known[path] = entry
        return not is_same

    def _set_name(self, path: str, exists: bool) -> None:
        folder, name = os.path.split(path)
        if name and folder in self._known:
            self._known[folder].names[name] = exists

    def forget(self, path: str) -> None:
        """Forget the attributes of a path; a folder's names are forgotten with them."""
        with self._lock:
            self._known.pop(path, None)

    def _forget_below(self, path: str) -> None:
        """Forget the attributes and names of a path and of all paths below it."""
        paths_below = [known for known in self._known if known == path or known.startswith(f"{path}/")]
        for path_below in paths_below:
            del self._known[path_below]

    @contextlib.contextmanager
    def changing(self, path: str, *, exists: bool) -> Iterator[None]:
        """Let the block change an entry of a folder, and store the folder's attributes after the change.

        Args:
            path: the path of the entry.
            exists: whether the entry exists after the change.
        """
        folder = os.path.dirname(path)
        with self._lock:
            before = self._ask_server(folder)
            known = self._known.get(folder)
            names: dict[str, bool] = {}
            if known is not None and _state(known.attributes) == _state(before):
                names = known.names

            self._forget_below(path)
            try:
                yield
            except OSError:
                # The server has refused the change, so the stored attributes of the folder may be wrong.
                self.forget(folder)
                raise

            after = self._ask_server(folder)
            self._known[folder] = _Remembered(
                after, self._options.acdirmin, self._clock(), _is_settled(after), names
            )
            self._set_name(path, exists)


def _state(attributes: os.stat_result) -> tuple[int, ...]:
    """Return the attributes by which a client notices a change."""
    return (attributes.st_ino, attributes.st_size, attributes.st_mtime_ns, attributes.st_ctime_ns)


def _is_settled(attributes: os.stat_result) -> bool:
    """Return whether every change from now on gets another time stamp than the file has."""
    return time.time_ns() - attributes.st_ctime_ns > CLOCK_TICK_NS
