"""Standard streams that can't end a process: on a full disk a line is lost, and nothing else happens.

Python raises the error of a line that can't be written, in whoever wrote it. So a log on a full disk would
end an agent at the first thing that it tells, and turn a rank's own exit code into that of the error.
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
    """A file for which what can't be written counts as written."""

    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            written: int | None = super().write(data)
            if written is not None:
                return written
        return memoryview(data).nbytes


def lines_to(descriptor: int) -> TextIO:
    """Return a stream that writes line by line, and leaves `descriptor` open when it is closed."""
    raw = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def keep_output() -> None:
    """Let both output streams of this process be such streams; one that is closed leads nowhere.

    To be called before anything is opened: what is opened next would take the place of a closed one.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # What was printed so far.
            stream.flush()
    sys.stdout, sys.stderr = lines_to(1), lines_to(2)


def tell(text: str) -> None:
    """Print `text` to stderr, and to this process's own log if a program has put another stream in its place.

    What a rank ends with is looked for in its log; a stderr that was closed must not take it away.
    """
    before = _log_size()
    with suppress(Exception):  # What stands there now is the program's own.
        print(text, file=sys.stderr, flush=True)
        if sys.stderr.fileno() == 2:
            return
    if _log_size() == before:  # Else that stream passes on to the log what is written to it.
        with suppress(OSError):
            print(text, file=lines_to(2), flush=True)


def _log_size() -> int:
    with suppress(OSError):
        return os.fstat(2).st_size
    return 0
