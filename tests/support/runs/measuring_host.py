"""One of two hosts that measure a folder, in a process of its own; its file system may have a fault.

    python -m support.runs.measuring_host FOLDER INDEX LIMIT_S DESCRIPTOR [FAULT]

The hosts are connected by a pair of sockets. The process prints the result as JSON, or the error.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder import measure_files
from support.runs.taken_names import refusing_open


class Pair:
    """The connection of this host to the other host, over a pair of sockets."""

    count = 2

    def __init__(self, index: int, descriptor: int) -> None:
        self.index = index
        self._socket = socket.socket(fileno=descriptor)
        self._answers = self._socket.makefile()

    def gather(self, value: Any) -> list[Any]:
        self._socket.sendall(f"{json.dumps(value)}\n".encode())
        values = [value, json.loads(self._answers.readline())]
        return values if self.index == 0 else values[::-1]


def see_nothing() -> None:
    """Imitate a file system that shows no file of the other host."""
    measure_files.is_there = lambda file: False
    measure_files.read_bytes = lambda file: None


def see_no_change() -> None:
    """Imitate a file system that shows each file for ever as it was at the first look."""
    measure_files.is_there = cache(measure_files.is_there)
    measure_files.read_bytes = cache(measure_files.read_bytes)


def see_after_touch() -> None:
    """Imitate a file system that shows each file as it was, until this host touches the folder."""
    see_no_change()
    measure_files.look_again = lambda folder: (
        measure_files.is_there.cache_clear(),
        measure_files.read_bytes.cache_clear(),
    )


def see_no_names() -> None:
    """Imitate a file system that shows a new file of the other host in listings alone."""
    for look in ("name", "open"):
        steps = measure_files.LOOKS[look]
        measure_files.LOOKS[look] = steps._replace(sees=lambda file: False)


def see_no_folder() -> None:
    """Imitate a file system that shows the other host's files by their paths, but not its folder."""
    whole = Path.is_dir
    Path.is_dir = lambda path: path.name not in ("0", "1") and whole(path)


def show_the_folder_late() -> None:
    """Imitate a file system that shows the folder of the measurement only at the third look."""
    whole = Path.mkdir
    looks = count()
    shown: list[Path] = []

    def is_there(path: Path) -> bool:
        if next(looks) >= 2:
            shown.append(path)
        return bool(shown)

    def make(path: Path, mode: int = 0o777) -> None:
        if path.name in ("0", "1") and not shown:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        whole(path, mode)

    Path.is_dir = is_there
    Path.mkdir = make


def replace_in_place() -> None:
    """Imitate a file system that replaces a file in place: a reader may find half of a long text."""
    whole = measure_files.write_atomic
    measure_files.write_atomic = lambda file, text: (
        file.write_text(text[: len(text) // 2]) if len(text) > 100 else whole(file, text)
    )


def replace_by_removal() -> None:
    """Imitate a file system that removes a file before a long text replaces it."""
    whole = measure_files.write_atomic
    measure_files.write_atomic = lambda file, text: (
        file.unlink(missing_ok=True) if len(text) > 100 else whole(file, text)
    )


def replace_by(other: Callable[[str], str]) -> None:
    """Imitate a file system that puts a wrong text in place of a long text."""
    whole = measure_files.write_atomic
    measure_files.write_atomic = lambda file, text: whole(file, other(text) if len(text) > 100 else text)


def report_stale_handles() -> None:
    """Imitate a file system that reports a stale handle at each second read."""
    whole = measure_files.read_regular
    reads = count()

    def read(file: Path) -> bytes:
        if next(reads) % 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return whole(file)

    measure_files.read_regular = read


def append_half_lines() -> None:
    """Imitate a file system that appends only the first letters of each line."""

    def append(file: Path, record: dict[str, Any]) -> None:
        with file.open("a") as stream:
            stream.write(json.dumps(record)[:4])

    measure_files.append_line = append


def lose_lines(name: str) -> None:
    """Imitate a file system that loses the first and then each second appended line."""
    whole = getattr(measure_files, name)
    setattr(measure_files, name, lambda file, record: whole(file, record) if record["line"] % 2 else None)


def wait_for_no_lines() -> None:
    """Imitate a file system that loses lines without a lock; fail if the measurement waits for them."""
    lose_lines("_append_plain")
    trial = measure_files._Trial
    read_lines = trial._read_lines

    def read(self: Any, lines: int, plain_lines: int) -> tuple[int, int, int]:
        self._wait = refuse_to_wait
        return read_lines(self, lines, plain_lines)

    trial._read_lines = read


def refuse_to_wait(condition: Callable[[], bool]) -> bool:
    if not condition():
        raise OSError("it waits for lines that are lost")
    return True


def see_lines_late() -> None:
    """Imitate a file system that shows the lines of all hosts only at the third read."""
    whole = measure_files.read_bytes
    reads = count()
    measure_files.read_bytes = lambda file: None if file.name == "lines" and next(reads) < 2 else whole(file)


def see_lines_after_touch() -> None:
    """Imitate a file system that shows the lines of all hosts once this host has touched their folder."""
    whole = measure_files.read_bytes
    look_again = measure_files.look_again
    touched: set[Path] = set()
    measure_files.look_again = lambda folder: (touched.add(folder), look_again(folder))
    measure_files.read_bytes = lambda file: (
        None if file.name == "lines" and file.parent not in touched else whole(file)
    )


def cut_last_lines() -> None:
    """Imitate a file system that shows only a part of the last line of a file to which all hosts append."""
    whole = measure_files.read_bytes
    measure_files.read_bytes = lambda file: (
        whole(file)[:-3] if file.name in ("lines", "plain") else whole(file)
    )


def empty_last_lines() -> None:
    """Imitate a file system that shows an empty line as the last line of a file to which all hosts append."""
    whole = measure_files.read_bytes
    measure_files.read_bytes = lambda file: (
        b"".join(whole(file).splitlines(True)[:-1]) + b"\n"
        if file.name in ("lines", "plain")
        else whole(file)
    )


def lock_here_alone() -> None:
    measure_files.try_lock = lambda descriptor: True
    measure_files._try_fcntl = lambda descriptor: True


def lock_nothing() -> None:
    measure_files.try_lock = lambda descriptor: None
    measure_files._try_fcntl = lambda descriptor: None


def refuse_locks() -> None:
    """Imitate a file system that refuses each lock, as if another host held it."""
    measure_files.try_lock = lambda descriptor: False
    measure_files._try_fcntl = lambda descriptor: False


def have_no_fcntl_at_first() -> None:
    """Imitate a file system that has no locks of fcntl at the first call, which the second host makes."""
    whole = measure_files.fcntl.lockf
    calls = count()

    def lock(descriptor: int, operation: int) -> None:
        if next(calls) == 0:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        whole(descriptor, operation)

    measure_files.fcntl.lockf = lock


def take_all_names() -> None:
    """Imitate a file system that reports of each new name that it exists."""

    def create(path: Path, is_folder: bool) -> None:
        raise FileExistsError

    measure_files._create_new = create


def remove_what_is_listed() -> None:
    """Imitate a file system that removes a folder only right after a touch, as the last of all hosts."""
    remove = measure_files.shutil.rmtree
    look_again = measure_files.look_again
    touched: list[Path] = []

    def touch(folder: Path) -> None:
        touched.append(folder)
        look_again(folder)

    def remove_listed(folder: Path, ignore_errors: bool) -> None:
        is_own = folder.name in ("0", "1")
        if is_own or (touched[-1:] == [folder] and not (folder / "1").exists()):
            remove(folder, ignore_errors=ignore_errors)
            # A removal leaves the listings that the client remembers.
            touched.append(folder / "removed")

    measure_files.look_again = touch
    measure_files.shutil.rmtree = remove_listed


def create_again() -> None:
    """Imitate a file system that lets several hosts create the same name."""
    measure_files._create_new = lambda path, is_folder: None


def refuse_taken_names() -> None:
    measure_files.os.open = refusing_open


def refuse_links() -> None:
    def link(*paths: object) -> None:
        raise PermissionError("no links")

    measure_files.os.link = link


def refuse_to_flush_folders() -> None:
    def sync(folder: Path) -> None:
        raise OSError("no flush")

    measure_files._sync = sync


FAULTS = {
    "sees nothing": see_nothing,
    "sees no change": see_no_change,
    "sees changes after a touch": see_after_touch,
    "sees no names": see_no_names,
    "sees no folder": see_no_folder,
    "shows the folder late": show_the_folder_late,
    "replaces in place": replace_in_place,
    "replaces by removal": replace_by_removal,
    "replaces by a part": lambda: replace_by(lambda text: text[: len(text) // 2]),
    "replaces by a mixture": lambda: replace_by(lambda text: text[1:] + "-"),
    "reports stale handles": report_stale_handles,
    "appends half lines": append_half_lines,
    "loses lines": lambda: lose_lines("append_line"),
    "loses plain lines": lambda: lose_lines("_append_plain"),
    "waits for no lines": wait_for_no_lines,
    "sees lines late": see_lines_late,
    "sees lines after a touch": see_lines_after_touch,
    "cuts the last lines": cut_last_lines,
    "empties the last lines": empty_last_lines,
    "locks here alone": lock_here_alone,
    "has no locks": lock_nothing,
    "is refused locks": refuse_locks,
    "has no fcntl at first": have_no_fcntl_at_first,
    "has all names taken": take_all_names,
    "removes what is listed": remove_what_is_listed,
    "creates again": create_again,
    "refuses taken names": refuse_taken_names,
    "has no links": refuse_links,
    "flushes no folders": refuse_to_flush_folders,
}


def main() -> None:
    folder, index, limit_s, descriptor, *fault = sys.argv[1:]
    for name in fault:
        FAULTS[name]()
    hosts = Pair(int(index), int(descriptor))
    try:
        result = measure_files.measure(Path(folder), hosts, name=f"n{index}", limit_s=float(limit_s))
    except SlurmddpError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps(asdict(result), default=str))


if __name__ == "__main__":
    main()
