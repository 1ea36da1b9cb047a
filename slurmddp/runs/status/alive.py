"""Whether the process of a local run still lives, told apart from a stranger that was given its number."""

from __future__ import annotations

import os
import socket

from slurmddp.host import process
from slurmddp.runs.folder.history import Attempt

_SLACK_S = 5.0
"""The event of a start is written a little after the process began; clocks may differ by this much too."""


def is_alive(attempt: Attempt) -> bool | None:
    """Tell whether the process of a local attempt still runs; None where that can't be seen from here.

    It is on another host, or is not told, or /proc does not show it (`hidepid`, a system without /proc).
    """
    if attempt.pid is None or attempt.started is None or not is_here(attempt):
        return None
    fields = process.stat(attempt.pid)
    if fields is None:
        return None if process.exists(attempt.pid) else False
    if fields[0] in "ZX":
        return False
    if attempt.process_start is not None:
        return process.start_time(attempt.pid) == attempt.process_start
    return _began(fields) <= attempt.started + _SLACK_S


def is_here(attempt: Attempt) -> bool:
    """Whether an attempt was started on this machine, as far as its name tells."""
    return attempt.host in (None, socket.gethostname())


def _began(fields: list[str]) -> float:
    """Return by this machine's clock when a process began: all that a record of an older version can tell."""
    lines = (process.PROC / "stat").read_text(encoding="utf-8").splitlines()
    boot = next(float(line.split()[1]) for line in lines if line.startswith("btime"))
    return boot + float(fields[19]) / os.sysconf("SC_CLK_TCK")
