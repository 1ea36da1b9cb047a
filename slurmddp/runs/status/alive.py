"""Find out whether the process of a local run still runs, and not another process with its pid."""

from __future__ import annotations

import os
import socket

from slurmddp.host import process
from slurmddp.runs.folder.history import RecordedAttempt

_SLACK_S = 5.0
"""Largest delay in seconds of the kernel's start time of a process after the time of its `started` event."""


def is_alive(attempt: RecordedAttempt) -> bool | None:
    """Return whether the process of a local attempt still runs; None if this can't be found out.

    It can't be found out if the process is on another host, if no pid was recorded, or if /proc hides
    processes of other accounts (mount option `hidepid`).
    """
    if attempt.pid is None or attempt.started is None or not is_here(attempt):
        return None

    fields = process.stat(attempt.pid)
    if fields is None:
        return None if process.exists(attempt.pid) else False
    # State Z is a zombie, X a process that the kernel is removing: both have ended.
    if fields[0] in "ZX":
        return False
    if attempt.process_start is not None:
        return process.start_time(attempt.pid) == attempt.process_start
    return _began(fields) <= attempt.started + _SLACK_S


def is_here(attempt: RecordedAttempt) -> bool:
    """Return whether an attempt was started on this host; True if its host was not recorded."""
    return attempt.host in (None, socket.gethostname())


def _began(fields: list[str]) -> float:
    """Return when a process started, in seconds since the epoch, from its fields of /proc/PID/stat.

    The time is compared only for events of older versions, which do not hold `process_start`.
    """
    lines = (process.PROC / "stat").read_text(encoding="utf-8").splitlines()
    boot = next(float(line.split()[1]) for line in lines if line.startswith("btime"))
    return boot + float(fields[19]) / os.sysconf("SC_CLK_TCK")
