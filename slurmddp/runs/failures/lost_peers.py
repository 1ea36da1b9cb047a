"""Find out from torch's messages whether a process ended only because it lost another rank; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurmddp.errors import EXIT_FAILED
from slurmddp.runs.failures.tracebacks import before_last, plain_lines, raised_at, went_on

_LOST = re.compile(
    r"(gloo/|pair\.cc).*(connection|timed? ?out|closed|broken pipe|(read|write) error)"
    r"|connection closed by peer \[|timeout caused pair closure|gloo (\S+ )?(failed|timed? ?out)"
    r"|(failed to pass|timed out in|reached) monitoredBarrier"
    r"|torch\.distributed\.Dist\w*Error: .*(connection|broken pipe|timed? ?out)"
    r"|(TCPStore|SocketImpl).*(connection|broken pipe)"
    r"|nccl.*(abort|remote|timed? ?out)|collective operation timeout",
    re.IGNORECASE,
)
_NOTHING_OF_IT = re.compile(r"\s|frame #|.*\bNCCL INFO\b")
"""Lines that say nothing about a loss: code, frames, NCCL's log."""
_OTHERS_ERROR = re.compile(r"(?!RuntimeError|torch\.distributed\.|nccl)[A-Za-z_][\w.]*(Error|Exception)\b")
"""Errors of a program that lost its storage or a server: torch uses only its own errors for a lost rank."""
_LINES = 5


def words_of_loss(lines: Sequence[str]) -> str:
    """Return the line in which a process says that it lost another rank; empty without such a line.

    Only the message of the last exception counts, or the last lines without an exception.
    """
    return _words_of_loss(before_loss(plain_lines(lines)))


def before_loss(plain: Sequence[str]) -> Sequence[str]:
    """Return the lines up to an own error of the process, if it lost others only while handling this error.

    An example is `finally: barrier()`, which the other ranks never reach.
    """
    earlier = before_last(plain) if _words_of_loss(plain) else None
    return plain if earlier is None or _words_of_loss(earlier) else earlier


def _words_of_loss(plain: Sequence[str]) -> str:
    raised = raised_at(plain)
    said = plain[-_LINES:] if raised is None else plain[raised : raised + _LINES]
    if raised is not None and (not _may_tell(said[0]) or went_on(plain, raised, EXIT_FAILED)):
        return ""
    return next((line.strip() for line in reversed(said) if _may_tell(line) and _LOST.search(line)), "")


def _may_tell(line: str) -> bool:
    return not _NOTHING_OF_IT.match(line) and not _OTHERS_ERROR.match(line)
