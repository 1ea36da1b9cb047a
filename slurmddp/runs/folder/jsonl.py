"""Append-only files of JSON lines: many writers, broken lines left out."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmddp.errors import SlurmddpError, unreadable
from slurmddp.host.file_lock import try_lock
from slurmddp.host.regular_file import open_regular

_warned: set[str] = set()


def append_line(path: Path, *records: dict[str, Any]) -> None:
    """Append a JSON line for each record with a single write, so that lines of several writers do not mix.

    Raises:
        OSError: the last line was not written completely. The next call then starts a new line.
    """
    line = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        _lock_a_moment(descriptor)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def _lock_a_moment(descriptor: int) -> None:
    """Lock a file against other writers until it is closed; give up after one second.

    Appending is not atomic on NFS, but a missing lock must not stop a training.
    """
    deadline = time.monotonic() + 1.0
    while try_lock(descriptor) is False and time.monotonic() <= deadline:
        time.sleep(0.01)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON records of `path`, without broken lines and without an unfinished last line.

    Each broken line is logged once as a warning.

    Raises:
        SlurmddpError: the file can't be opened, or has broken lines and no record.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error
    broken: list[tuple[int, str]] = []
    found = False
    with io.TextIOWrapper(file, encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith("\n"):
                break
            try:
                records = _records_in(line.replace("\0", ""))
            except ValueError:
                records = []
                broken.append((number, line.strip()[:80]))
            else:
                if "\0" in line:  # A server's crash leaves zeros; a record may follow them.
                    broken.append((number, "zeros"))
            found = found or bool(records)
            yield from records
    if broken and not found:
        raise SlurmddpError(
            f"{path}, line {broken[0][0]} is not JSON: {broken[0][1]!r}.",
            hint="Another program damaged the file: remove that line.",
        )
    for number, text in broken:
        warn_once(f"{path}, line {number} is no record and is left out: {text!r}.")


def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged it before."""
    if text not in _warned:
        _warned.add(text)
        import logging  # The batch step has seconds left, and does not need it.

        logging.getLogger(__name__).warning(text)


def _records_in(line: str) -> list[dict[str, Any]]:
    """Return the record of a line; of a line that a full disk cut off, the record appended to it."""
    if not line.strip():
        return []
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError
        return [record]
    except ValueError:
        if not line.startswith('{"'):
            raise
    glued = line.rfind(line[: line.find('"', 2) + 1])  # records of one file begin with the same key
    try:
        return [json.loads(line[glued:])] if glued > 0 else []
    except ValueError:
        return []
