"""Append-only files of JSON lines: several processes write, and readers skip broken lines."""

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
"""Warnings that this process has logged."""


def append_line(path: Path, *records: dict[str, Any]) -> None:
    """Append a JSON line for each record with a single write, so that lines of several writers do not mix.

    Raises:
        OSError: the records could not be written completely. The next call starts a new line.
    """
    content = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    try:
        _lock_a_moment(descriptor)
        # A killed writer or a full disk may have left half a line: end it by a line break.
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content

        # On a nearly full disk, os.write writes only some bytes; the next call raises the error.
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)


def _lock_a_moment(descriptor: int) -> None:
    """Lock a file against other writers until it is closed; after one second, continue without the lock."""
    # The lock is needed on NFS, where appending is not atomic. But a writer that keeps its lock must not stop
    # a training.
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
    has_records = False
    with io.TextIOWrapper(file, encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, 1):
            # Another process is still writing this line.
            if not line.endswith("\n"):
                break

            try:
                # A file server that crashed may leave zero bytes in the file; a record may follow them on the
                # same line.
                records = _records_in(line.replace("\0", ""))
            except ValueError:
                records = []
                broken.append((number, line.strip()[:80]))
            else:
                if "\0" in line:
                    broken.append((number, "zeros"))
            has_records = has_records or bool(records)
            yield from records

    if broken and not has_records:
        raise SlurmddpError(
            f"{path}, line {broken[0][0]} is not JSON: {broken[0][1]!r}.",
            hint="Another program damaged the file: remove that line.",
        )
    for number, text in broken:
        warn_once(f"{path}, line {number} is not a JSON record and is skipped: {text!r}.")


def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged it before."""
    if text not in _warned:
        _warned.add(text)
        # Importing logging takes time, and SLURM may leave the batch step few seconds: import it only for a
        # warning.
        import logging

        logging.getLogger(__name__).warning(text)


def _records_in(line: str) -> list[dict[str, Any]]:
    """Return a list with the record of a line; empty for a blank line.

    If another record was appended to a line that a full disk had cut off, only the second record is returned,
    or none if it can't be read.

    Raises:
        ValueError: the line is not JSON and does not begin like a record.
    """
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

    # All records of a file begin with the same key, so the last occurrence of the line's first key begins the
    # second record.
    start = line.rfind(line[: line.find('"', 2) + 1])
    if start <= 0:
        return []
    try:
        return [json.loads(line[start:])]
    except ValueError:
        return []
