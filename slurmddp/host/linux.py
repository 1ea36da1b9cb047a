"""Promises of the Linux kernel that keep orphans and zombies away; elsewhere they are quietly not made.

A process can ask for a signal at the death of its parent, and an ancestor can ask to inherit the orphans
below it. Python offers neither, so they are reached through the C library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FROM_A_TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        refused = f"prctl({option}) was refused: {os.strerror(ctypes.get_errno())}."
        warnings.warn(f"{refused} Processes may be left behind when this one is killed.", stacklevel=3)


def die_with_parent(sent: signal.Signals, parent: int | None = None) -> None:
    """Ask for the signal `sent` when the parent dies; at once if `parent`, its known pid, is dead already."""
    _prctl(_PR_SET_PDEATHSIG, sent)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sent)


def adopt_orphans() -> None:
    """Become the parent of every orphan among the descendants, so that none is left as a zombie elsewhere."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def call_oneself(name: str) -> None:
    """Take a name by which `ps` and `/proc/PID/comm` tell this process from its parent; 15 bytes at most."""
    _prctl(_PR_SET_NAME, name.encode())


def children() -> list[int]:
    """Return the processes whose parent this one is, adopted ones and ended ones included."""
    found, own = [], str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # It may be gone.
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == own:
                found.append(int(stat.parent.name))
    return found


def end_children(timeout_s: float) -> None:
    """Kill every child, and what these leave behind: an adopted orphan (see `adopt_orphans`) is the next."""
    deadline = time.monotonic() + timeout_s
    while (left := children()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def start_bound(
    command: Sequence[str], death_signal: signal.Signals, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `command` in its own session; it gets `death_signal` when the calling thread dies."""
    parent = os.getpid()
    # A signal to our group reaches the child too until it has left it; there it would be written into our
    # own wake-up pipe, and one Ctrl-C would count as two.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_A_TERMINAL)

    def bind() -> None:
        with suppress(ValueError):  # Only a program's main thread has a pipe to let go of.
            signal.set_wakeup_fd(-1)
        die_with_parent(death_signal, parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread at a fork; between fork and exec `bind` takes no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(command, preexec_fn=bind, start_new_session=True, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_group(leader: int, sent: signal.Signals) -> None:
    """Send `sent` to the process group that `leader` founded; a group that is gone is no error."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sent)


def usable_cpus() -> int:
    """Return how many CPUs this process may use, as the scheduler bound it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def age_s() -> float:
    """Return for how many seconds this process has run its present program or the one before it, or 0.0.

    The kernel counts from the fork; srun and the local launcher let a program follow on it at once.
    """
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
        started = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
