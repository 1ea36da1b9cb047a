"""Measure what the file system of a folder gives several hosts: visibility, rename, append, locks.

Every host calls `measure`. The hosts agree on each step over their own connection and never through files,
because the files are what they measure. Each change has a folder of its own: a listing of a folder would
refresh what a client remembers of other names in it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from slurmddp.errors import ConfigError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.host.file_lock import try_lock
from slurmddp.host.mounts import file_system_type
from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder.file_system import (
    BY_LISTING,
    BY_NAME,
    EXCLUDES,
    ONE_HOST,
    UNSUPPORTED,
    FileSystem,
    HostView,
)
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.late_files import create_new, is_there, look_again, read_bytes

_POLL_S = 0.02
_BUSY_S = 0.3
"""Seconds for which the hosts replace files, and for which they append lines."""
_REPLACED_BYTES = 64 << 10
_MAX_LINES = 100
_NEW_NAMES = 20
_OLD = b"old\n"
_NEW = b"new content\n"
"""The content that replaces `_OLD`; longer, because sshfs overlooks new content of equal size and second."""


class Hosts(Protocol):
    """The connection of one host to all hosts that measure the file system together."""

    index: int
    """The number of this host, from 0."""
    count: int
    """The number of hosts."""

    def gather(self, value: Any) -> list[Any]:
        """Wait for a JSON value of each host; return the values in the order of the hosts.

        Raises:
            SlurmddpError: a host has left, or sends no value in time.
        """
        ...


def measure(
    parent: Path, hosts: Hosts, *, name: str, limit_s: float, looks: Mapping[str, str] = BY_NAME | BY_LISTING
) -> FileSystem:
    """Measure the file system of a folder in a new folder inside it, which is removed again.

    Every host calls it at about the same time.

    Args:
        parent: the folder; it has the same path on all hosts.
        hosts: the connection to the other hosts.
        name: the name of this host.
        limit_s: seconds to wait for a change of another host.
        looks: the ways to look for a file that are measured: keys of `BY_NAME` and `BY_LISTING`.

    Raises:
        ConfigError: a host does not see the folder, or can't write there.
        SlurmddpError: a host has left, or is silent.
    """
    token = hosts.gather(secrets.token_hex(6))[0]
    trial = _Trial(parent / f".files-{token}", hosts, name, limit_s, looks)
    try:
        return trial.run()
    finally:
        if hosts.index == 0:
            look_again(trial.folder)
            shutil.rmtree(trial.folder, ignore_errors=True)


class _Look(NamedTuple):
    """A change of a file, and a way in which other hosts look for it. Each function gets the file's path."""

    prepare: Callable[[Path], object]
    """Creates the file that will change, if there is one."""
    change: Callable[[Path], object]
    is_ready: Callable[[Path], bool]
    """Returns whether another host sees the prepared file, whose state its client then caches."""
    sees: Callable[[Path], bool]
    """Returns whether another host sees the change."""


def _leave_out(_file: Path) -> None:
    """Prepare no file, because the change creates it."""


def _write_old(file: Path) -> None:
    file.write_bytes(_OLD)


def _write_new(file: Path) -> None:
    file.write_bytes(_NEW)


def _grow(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(_NEW)


def _replace(file: Path) -> None:
    write_atomic(file, _NEW.decode())


def _opens(file: Path) -> bool:
    try:
        file.open("rb").close()
    except OSError:
        return False
    return True


LOOKS: Mapping[str, _Look] = {
    "name": _Look(_leave_out, _write_new, lambda file: not file.exists(), lambda file: file.exists()),
    "open": _Look(_leave_out, _write_new, lambda file: not _opens(file), lambda file: _opens(file)),
    "listing": _Look(_leave_out, _write_new, lambda file: not is_there(file), lambda file: is_there(file)),
    "grown": _Look(
        _write_old, _grow, lambda file: read_bytes(file) == _OLD, lambda file: read_bytes(file) == _OLD + _NEW
    ),
    "replaced": _Look(
        _write_old, _replace, lambda file: read_bytes(file) == _OLD, lambda file: read_bytes(file) == _NEW
    ),
    "removed": _Look(
        _write_old, Path.unlink, lambda file: is_there(file), lambda file: not is_there(file)
    ),
}  # fmt: skip


class _Trial:
    """The steps of one measurement on one host."""

    def __init__(
        self, folder: Path, hosts: Hosts, name: str, limit_s: float, looks: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._hosts = hosts
        self._name = name
        self._limit_s = limit_s
        self._looks = looks
        self._unready: set[tuple[int, str]] = set()
        self._others = [index for index in range(hosts.count) if index != hosts.index]

    def run(self) -> FileSystem:
        """Run all steps of the measurement together with the other hosts, and return the result."""
        self._together(self._create)
        self._together(self._prepare)
        self._together(self._look_before)
        self._together(self._change)
        views = self._together(self._watch)
        reads = self._together(self._replace_and_read)
        appended = self._together(self._append)
        lines = sum(count for count, _ in appended)
        plain_lines = sum(count for _, count in appended)
        read = self._together(lambda: self._read_lines(lines, plain_lines))
        created = sum(self._together(self._create_new_names))
        flock = self._locks(try_lock, "flock")
        fcntl_locks = self._locks(_try_fcntl, "fcntl")
        links, synced = zip(*self._together(self._link_and_sync), strict=True)
        self._together(lambda: shutil.rmtree(self._of(self._hosts.index), ignore_errors=True))

        return FileSystem(
            folder=self.folder.parent,
            hosts=tuple(HostView(**{**view, "unseen": tuple(view["unseen"])}) for view in views),
            limit_s=self._limit_s,
            reads=sum(count for count, _ in reads),
            broken_reads=sum(broken for _, broken in reads),
            lines=lines,
            lost_lines=max(lost for lost, _, _ in read),
            broken_lines=max(broken for _, broken, _ in read),
            lost_plain_lines=max(lost for _, _, lost in read),
            doubly_created=max(0, created - _NEW_NAMES),
            flock=flock,
            fcntl=fcntl_locks,
            hard_links=all(links),
            synced_folders=all(synced),
        )

    def _together(self, step: Callable[[], Any]) -> list[Any]:
        """Take a step, wait until all hosts have taken theirs, and return the results of all hosts.

        Raises:
            ConfigError: on all hosts, if a step failed on one.
            SlurmddpError: a host has left, or is silent.
        """
        value = None
        error = ""
        try:
            value = step()
        except OSError as failure:
            error = f"{self._name}: {failure}"

        answers = self._hosts.gather([value, error])
        for _, message in answers:
            if message:
                raise ConfigError(
                    f"The folder can't be used by all hosts: {message}.",
                    hint="It must have the same path on the nodes and on the login node, and be writable.",
                )
        return [answer for answer, _ in answers]

    def _of(self, host: int) -> Path:
        """Return the folder in which a host makes its changes."""
        return self.folder / str(host)

    def _file(self, host: int, look: str) -> Path:
        return self._of(host) / look / "file"

    def _create(self) -> None:
        # A host without the folder fails at once, instead of waiting for it.
        os.listdir(self.folder.parent)  # noqa: PTH208
        if self._hosts.index == 0:
            self.folder.mkdir(0o700)
            (self.folder / "new").mkdir()

    def _prepare(self) -> None:
        # The name of the folder is new, so that no client remembers that it did not exist.
        self._wait(lambda: (self.folder / "new").is_dir())
        self._of(self._hosts.index).mkdir()
        for look in self._looks:
            file = self._file(self._hosts.index, look)
            file.parent.mkdir()
            LOOKS[look].prepare(file)
        _write_letter(self._of(self._hosts.index) / "letters", 0)

    def _look_before(self) -> None:
        """Look for each change before it is made, so that the file system's client caches the old state."""
        self._unready = {(host, look) for host in self._others for look in self._looks}

        def is_ready() -> bool:
            for host, look in sorted(self._unready):
                if self._of(host).is_dir() and LOOKS[look].is_ready(self._file(host, look)):
                    self._unready.discard((host, look))
            return not self._unready

        self._wait(is_ready)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition up to the limit; return whether it came true."""
        deadline = time.monotonic() + self._limit_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _change(self) -> None:
        for look in self._looks:
            LOOKS[look].change(self._file(self._hosts.index, look))

    def _watch(self) -> dict[str, Any]:
        """Look for all changes of the other hosts again and again until each is seen, up to the limit.

        Returns:
            The fields of this host's `HostView`.
        """
        began = time.monotonic()
        waiting = {(host, look) for host in self._others for look in self._looks}
        seen_s: dict[str, float | None] = {}

        def sees_all() -> bool:
            for host, look in sorted(waiting):
                if LOOKS[look].sees(self._file(host, look)):
                    waiting.discard((host, look))
                    # Of several hosts, the slowest change is seen last, and its number stays.
                    seen_s[look] = round(time.monotonic() - began, 3)
            return not waiting

        self._wait(sees_all)
        # A host that did not see a file before its change can't see the change either.
        late = waiting | self._unready
        return {
            "host": self._name,
            "kind": file_system_type(self.folder),
            "seen_s": {
                **{look: seen_s.get(look) for look in self._looks},
                **{look: None for _, look in late},
            },
            "unseen": sorted({look for host, look in late if not self._sees_after_touch(host, look)}),
        }

    def _sees_after_touch(self, host: int, look: str) -> bool:
        """Touch the folder of a change, as slurmddp does before a decision; return whether that helps."""
        # slurmddp looks for files in these ways only, and other programs don't touch the folder before.
        if look not in BY_LISTING:
            return True

        file = self._file(host, look)
        look_again(file.parent)
        return (host, look) not in self._unready and LOOKS[look].sees(file)

    def _replace_and_read(self) -> tuple[int, int]:
        """Replace a file again and again, and read the files that the other hosts replace.

        Returns:
            The number of reads, and of those that found no file or a part of its content.
        """
        reads = 0
        broken = 0
        deadline = time.monotonic() + _BUSY_S
        while reads == 0 or time.monotonic() < deadline:
            _write_letter(self._of(self._hosts.index) / "letters", reads)
            for host in self._others:
                reads += 1
                broken += not _is_whole(self._of(host) / "letters")

        return reads, broken

    def _append(self) -> tuple[int, int]:
        """Append lines while the other hosts do so; return the number of lines with and without a lock."""
        return self._append_by(append_line, "lines"), self._append_by(_append_plain, "plain")

    def _append_by(self, append: Callable[[Path, dict[str, Any]], None], name: str) -> int:
        deadline = time.monotonic() + _BUSY_S
        count = 0
        while count < _MAX_LINES and (count == 0 or time.monotonic() < deadline):
            append(self.folder / name, {"host": self._hosts.index, "line": count})
            count += 1

        return count

    def _read_lines(self, lines: int, plain_lines: int) -> tuple[int, int, int]:
        """Read the appended lines; return the numbers of lost lines, broken lines, and lost plain lines."""
        locked = self.folder / "lines"
        plain = self.folder / "plain"

        # Wait for the locked lines, because lines of other hosts may become visible late. Plain lines may be
        # lost, so don't wait for them.
        self._wait(lambda: _whole_lines(locked)[0] >= lines)
        look_again(self.folder)
        whole, broken = _whole_lines(locked)
        return lines - whole, broken, plain_lines - _whole_lines(plain)[0]

    def _create_new_names(self) -> int:
        """Create the same new names as the other hosts; return how many of them this host created."""
        created = 0
        for number in range(_NEW_NAMES):
            path = self.folder / "new" / str(number)
            with suppress(FileExistsError):
                _create_new(path, is_folder=bool(number % 2))
                created += 1

        return created

    def _locks(self, lock: Callable[[int], bool | None], name: str) -> str:
        """Let each host in turn lock a file, and let the other hosts try to lock it meanwhile.

        Args:
            lock: tries to lock a descriptor; returns None if files can't be locked.
            name: the beginning of the files' names.

        Returns:
            EXCLUDES, ONE_HOST or UNSUPPORTED.
        """
        outcomes: list[bool | None] = []
        for holder in range(self._hosts.count):
            outcomes += self._lock_by(holder, lock, self.folder / f"{name}-{holder}")

        if None in outcomes:
            return UNSUPPORTED
        return ONE_HOST if True in outcomes else EXCLUDES

    def _lock_by(self, holder: int, lock: Callable[[int], bool | None], path: Path) -> list[bool | None]:
        """Return whether each other host got a lock that `holder` holds; [None] without support of locks."""
        is_holder = self._hosts.index == holder
        descriptors: list[int] = []

        def take() -> bool | None:
            descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            return lock(descriptors[0])

        try:
            held = self._together(lambda: take() if is_holder else None)[holder]
            if not held:
                return [None]

            tried = self._together(lambda: None if is_holder else take())
            return [result for host, result in enumerate(tried) if host != holder]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _link_and_sync(self) -> tuple[bool, bool]:
        """Return whether this host can make a hard link, and whether it can flush a folder to the disk."""
        folder = self._of(self._hosts.index)
        source = folder / "source"
        source.touch()
        return _succeeds(lambda: os.link(source, folder / "link")), _succeeds(lambda: _sync(folder))


def _write_letter(file: Path, number: int) -> None:
    """Replace a file by one letter, many times; the letter depends on `number`."""
    write_atomic(file, chr(ord("a") + number % 26) * _REPLACED_BYTES)


def _create_new(path: Path, *, is_folder: bool) -> None:
    """Create a file or a folder; raise FileExistsError if a host has created it already."""
    if is_folder:
        path.mkdir()
    else:
        os.close(create_new(path, 0o600))


def _is_whole(file: Path) -> bool:
    """Return whether a file has the content of one call of `_write_letter`."""
    try:
        content = read_regular(file)
    except OSError as error:
        # "Stale file handle": the client knows that the file was replaced. slurmddp then reads it again.
        return error.errno == errno.ESTALE

    return len(content) == _REPLACED_BYTES and len(set(content)) == 1


def _append_plain(file: Path, record: Mapping[str, Any]) -> None:
    """Append a JSON line without a lock."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{json.dumps(record)}\n".encode())
    finally:
        os.close(descriptor)


def _whole_lines(file: Path) -> tuple[int, int]:
    """Return how many different JSON lines a file has, and how many of its lines are broken."""
    whole = set()
    broken = 0
    for line in (read_bytes(file) or b"").splitlines():
        try:
            record = json.loads(line or b"null")
        except ValueError:
            broken += 1
            continue
        # `append_line` ends a broken line by a line break, which may leave an empty line.
        if record is not None:
            whole.add(line)

    return len(whole), broken


def _try_fcntl(descriptor: int) -> bool | None:
    """Try to lock a file by fcntl; return whether it is locked now, and None if it can't be locked."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _succeeds(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
