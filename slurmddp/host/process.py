"""Processes of this machine: who lives, who is whose child, and what dies with whom.

A process can ask the Linux kernel for a signal at the death of its parent. An ancestor can ask to inherit the
orphans below it. Python offers neither, so prctl(2) is called through the C library. Other systems make no
such promise.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    own = str(os.getpid())
    pids = [int(folder.name) for folder in PROC.glob("[0-9]*")]
    return [pid for pid in pids if (fields := stat(pid)) and fields[1] == own]


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


def has_ended(pid: int) -> bool:
    """Return whether a child has ended; it keeps its pid until it is waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap_orphans(but: Collection[int]) -> None:
    """Wait for the adopted orphans that have ended (see `adopt_orphans`); `but` have other owners."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in but:
                return  # Its owner waits for it, and SIGCHLD has announced it.
            os.waitpid(ended.si_pid, 0)


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
        started = int((stat(os.getpid()) or [])[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
