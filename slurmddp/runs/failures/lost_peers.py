"""Whether a process ended only because it lost, or never met, another rank: by what torch says; pure."""

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
"""Code, frames, and what NCCL writes down of its every act."""
_OTHERS_ERROR = re.compile(r"(?!RuntimeError|torch\.distributed\.|nccl)[A-Za-z_][\w.]*(Error|Exception)\b")
"""What a program says that lost its storage or a server: torch names a lost rank by its own errors only."""
_LINES = 5


def words_of_loss(lines: Sequence[str]) -> str:
    """Return the line in which a process says that it lost another rank; an empty text where it does not.

    It counts in what the exception says that came last; without one, in the last lines.
    """
    return _words_of_loss(before_loss(plain_lines(lines)))


def before_loss(plain: Sequence[str]) -> Sequence[str]:
    """Return the lines up to an error of the process's own, if it lost others only while it dealt with that.

    So it ends with `finally: barrier()`, for which the others do not come.
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
