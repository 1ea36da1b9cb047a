"""Two promises of the Linux kernel that keep orphans and zombies away; elsewhere they are quietly not made.

A process can ask for a signal at the death of its parent, and an ancestor can ask to inherit the orphans
below it. Python offers neither, so they are reached through the C library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FROM_A_TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(sent: signal.Signals, parent: int | None = None) -> None:
    """Ask for the signal `sent` when the parent dies; at once if `parent`, its known pid, is dead already."""
    _prctl(_PR_SET_PDEATHSIG, sent)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sent)


def adopt_orphans() -> None:
    """Become the parent of every orphan among the descendants, so that none is left as a zombie elsewhere."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


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
