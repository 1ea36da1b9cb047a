"""Standard streams that can't end a process: if the disk is full, a line is lost, and nothing else happens.

Python raises an error for a line that can't be written. A log on a full disk would therefore end an agent at
its first message, and would replace the exit code of a rank.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lossy(io.FileIO):
    """A file that drops data on errors."""

    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            written: int | None = super().write(data)
            if written is not None:
                return written
        # The writer would try again with data that was not written.
        return memoryview(data).nbytes


def lines_to(descriptor: int) -> TextIO:
    """Return a stream that writes each line at once, and leaves `descriptor` open when it is closed."""
    raw = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def keep_output() -> None:
    """Replace both output streams of this process by streams that never fail.

    Call this before the process opens files.
    """
    # The next file that a process opens would take the number of a stream that was closed.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)

    for stream in (sys.stdout, sys.stderr):
        # A flush may fail on a full disk. Python sets a stream to None if its descriptor is closed.
        with suppress(OSError, AttributeError):
            stream.flush()
    sys.stdout = lines_to(1)
    sys.stderr = lines_to(2)


def print_to_log(text: str) -> None:
    """Print `text` to stderr, and to the log of this process if a program has replaced stderr."""
    before = log_size()
    # The stream of a program may raise any error.
    with suppress(Exception):
        print(text, file=sys.stderr, flush=True)
        if sys.stderr.fileno() == 2:
            return

    # The agent reads the reason of a rank's end from the log, so the text must reach the log. The stream of
    # the program may have written it there.
    if log_size() == before:
        with suppress(OSError):
            print(text, file=lines_to(2), flush=True)


def log_size() -> int:
    """Return the number of bytes in this process's log; 0 if stderr is no file."""
    with suppress(OSError):
        return os.fstat(2).st_size
    return 0
