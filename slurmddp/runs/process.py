"""Whether the process of a local run still lives, told apart from a stranger that was given its number."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_SLACK_S = 5.0
"""The event of a start is written a little after the process began; clocks may differ by this much too."""


def is_alive(pid: int, host: str | None, started: float) -> bool | None:
    """Tell whether process `pid`, at work since `started`, still runs; None when it is on another host."""
    if host is not None and host != socket.gethostname():
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The program's name stands in brackets and may hold anything, brackets and spaces included.
    fields = stat.rpartition(")")[2].split()
    return fields[0] != "Z" and _began(fields) <= started + _SLACK_S


def _began(fields: list[str]) -> float:
    """Return when a process began, from the fields of its `stat` after the name (proc(5), field 22)."""
    lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
    boot = next(float(line.split()[1]) for line in lines if line.startswith("btime"))
    return boot + float(fields[19]) / os.sysconf("SC_CLK_TCK")
