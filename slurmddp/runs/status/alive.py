"""Find out whether the process of a local run still runs, and not another process with its pid."""

from __future__ import annotations

import os
import socket

from slurmddp.host import process
from slurmddp.runs.folder.history import RecordedAttempt

_SLACK_S = 5.0
"""Seconds between the start of a process and its event at most; the two clocks may differ by as much."""


def is_alive(attempt: RecordedAttempt) -> bool | None:
    """Return whether the process of a local attempt still runs; None if this can't be seen.

    The process may be on another host or unknown, or /proc does not show it (`hidepid`).
    """
    if attempt.pid is None or attempt.started is None or not is_here(attempt):
        return None

    fields = process.stat(attempt.pid)
    if fields is None:
        return None if process.exists(attempt.pid) else False
    # A zombie, or a process that the kernel is removing.
    if fields[0] in "ZX":
        return False
    if attempt.process_start is not None:
        return process.start_time(attempt.pid) == attempt.process_start
    return _began(fields) <= attempt.started + _SLACK_S


def is_here(attempt: RecordedAttempt) -> bool:
    """Return whether an attempt was started on this machine, judged by the host name."""
    return attempt.host in (None, socket.gethostname())


def _began(fields: list[str]) -> float:
    """Return when a process started, by the clock; events of older versions hold nothing better."""
    lines = (process.PROC / "stat").read_text(encoding="utf-8").splitlines()
    boot = next(float(line.split()[1]) for line in lines if line.startswith("btime"))
    return boot + float(fields[19]) / os.sysconf("SC_CLK_TCK")
