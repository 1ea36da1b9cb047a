"""Read how the ranks of a torchrun ended from the report that torchrun prints at its own end; pure.

torchrun itself exits with 1 after any failure of a rank, and after a signal to stop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile

from slurmddp.runs.failures.tracebacks import OF_A_RANK, TRACEBACK

_RAISED = re.compile(
    r"torch\.distributed\.elastic\.multiprocessing\."
    r"(?:api\.SignalException: Process \d+ got signal: (?P<signal>\d+)|errors\.ChildFailedError:)"
)
_FIRST = "Root Cause"
_RANK = re.compile(r"\s+rank\s+: (\d+)")
_EXIT_CODE = re.compile(r"\s+exitcode\s+: (-?\d+)")


@dataclass(frozen=True)
class TorchrunReport:
    """The report that torchrun prints at its end after a failure of a rank, or after a signal to torchrun."""

    exit_code: int
    """The exit code of the rank that failed first; negative for a signal to this rank or to torchrun."""
    rank: int | None
    """The rank that failed first, by torchrun's number; None after a signal to torchrun."""
    before: Sequence[str]
    """The lines before the report: the output of the ranks, without tracebacks of ranks that failed later."""


def read(lines: Sequence[str]) -> TorchrunReport | None:
    """Return the report of torchrun at the end of `lines`; None if there is none."""
    starts = [number for number, line in enumerate(lines) if line == TRACEBACK]
    begun = starts[-1] if starts else len(lines)
    raised = next((match for line in lines[begun:] if (match := _RAISED.match(line))), None)
    if raised is None:
        return None
    if raised["signal"]:
        return TorchrunReport(-int(raised["signal"]), None, lines[:begun])

    # The ranks above the title "Root Cause" failed later, so the lines begin at the title.
    first = list(dropwhile(lambda line: not line.startswith(_FIRST), lines[begun:]))
    ranks = [match[1] for line in first if (match := _RANK.match(line))]
    codes = [match[1] for line in first if (match := _EXIT_CODE.match(line))]
    if not ranks or not codes:
        return None
    prefix = f"[rank{ranks[0]}]: "
    before = [line for line in lines[:begun] if line.startswith(prefix) or not OF_A_RANK.match(line)]
    return TorchrunReport(int(codes[0]), int(ranks[0]), before)
