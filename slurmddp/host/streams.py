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
    """A raw file that ignores errors of writing: the data is lost."""

    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            written: int | None = super().write(data)
            if written is not None:
                return written
        # All bytes count as written: otherwise the buffered writer would try again with the rest.
        return memoryview(data).nbytes


def lines_to(descriptor: int) -> TextIO:
    """Return a text stream that writes each line at once and never fails.

    When the stream is closed, `descriptor` stays open.
    """
    raw = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def keep_output() -> None:
    """Replace stdout and stderr by streams that never fail (see `lines_to`).

    Call this before the process opens files.
    """
    # Closed descriptors are replaced by /dev/null: the next opened file would otherwise get number 0, 1 or 2.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)

    for stream in (sys.stdout, sys.stderr):
        # OSError: a flush may fail on a full disk. AttributeError: a stream is None if its descriptor was
        # closed.
        with suppress(OSError, AttributeError):
            stream.flush()
    sys.stdout = lines_to(1)
    sys.stderr = lines_to(2)


def print_to_log(text: str) -> None:
    """Print `text` to `sys.stderr`, and to the log (descriptor 2) if a program has replaced `sys.stderr`."""
    before = log_size()
    # A stream that a program has put in place of stderr may raise any error.
    with suppress(Exception):
        print(text, file=sys.stderr, flush=True)
        if sys.stderr.fileno() == 2:
            return

    # The text must reach the log, from which the agent reads why a rank ended. If the log has grown, the
    # program's stream has already written it there.
    if log_size() == before:
        with suppress(OSError):
            print(text, file=lines_to(2), flush=True)


def log_size() -> int:
    """Return the size in bytes of the file behind descriptor 2, the log; 0 if there is no such file."""
    with suppress(OSError):
        return os.fstat(2).st_size
    return 0
