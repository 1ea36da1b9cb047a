"""What tells one process from every other that has, or will have, its number on this machine."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def stat(pid: int) -> list[str] | None:
    """Return the fields of a process's `stat` from its state on (proc(5), field 3); None if it shows none."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program's name stands in brackets and may hold anything, brackets and spaces included.
    return text.rpartition(")")[2].split()


def exists(pid: int) -> bool:
    """Whether there is such a process, zombies and other accounts' included; below 0 it names a group."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def start_time(pid: int) -> str | None:
    """Return the boot and the tick of it at which a process began; None where the kernel does not tell.

    Neither changes when the clock is set, unlike a time of day made from them.
    """
    fields = stat(pid)
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return f"{boot} {fields[19]}" if fields else None
