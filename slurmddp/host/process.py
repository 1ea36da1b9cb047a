"""Processes of this machine: which run, who is the parent of whom, which die together, and the orphan reaper.

On Linux, a process can ask for a signal at the death of its parent, and an ancestor can adopt orphans below
it. Python offers neither, so this module calls prctl(2) through the C library.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

PROC = Path("/proc")


def stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from field 3, the state, on (proc(5)); None if it can't be read."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program's name stands in brackets and may hold anything, brackets and spaces included.
    return text.rpartition(")")[2].split()


def all_stats() -> dict[int, list[str]]:
    """Return the fields of `stat` for every process that can be read, by pid."""
    pids = [int(folder.name) for folder in PROC.glob("[0-9]*")]
    return {pid: fields for pid in pids if (fields := stat(pid))}


def exists(pid: int) -> bool:
    """Return whether a process exists, as a zombie or of another account too; below 0: a process group."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def handles(pid: int, sent: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal; False if the process is gone."""
    return sent in _signals_of(pid, "SigCgt")


def _signals_of(pid: int, field: str) -> frozenset[int]:
    """Return the signals, by number, in a field of /proc/PID/status (proc(5)); empty without the file."""
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                mask = int(line.split()[1], 16)
                return frozenset(bit + 1 for bit in range(mask.bit_length()) if mask >> bit & 1)
    return frozenset()


def start_time(pid: int) -> str | None:
    """Return the id of the boot and the clock tick at which a process started; None without /proc.

    Both stay the same when the clock is set.
    """
    fields = stat(pid)
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return f"{boot} {fields[19]}" if fields else None


def starter(environ: Mapping[str, str], names: Collection[str]) -> int | None:
    """Return the pid of the launcher that has set variables for this process; None if it can't be seen.

    The launcher is the nearest ancestor that was started with other values. So a shell around this process,
    which has inherited its variables, is not taken for the launcher.

    Args:
        environ: the variables of this process.
        names: the variables that the launcher sets.
    """
    own, pid = {name: environ.get(name) for name in names}, os.getppid()
    while (fields := stat(pid)) is not None:
        try:
            started_with = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return None
        found = dict(pair.split("=", 1) for pair in started_with if "=" in pair)
        if {name: found.get(name) for name in names} != own:
            return pid
        pid = int(fields[1])
    return None


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FROM_A_TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        refused = f"prctl({option}) was refused: {os.strerror(ctypes.get_errno())}."
        warnings.warn(f"{refused} Processes may be left behind when this one is killed.", stacklevel=3)


def die_with_parent(sent: signal.Signals, parent: int | None = None) -> None:
    """Ask for the signal `sent` at the parent's death; send it now if `parent` is given and already dead."""
    _prctl(_PR_SET_PDEATHSIG, sent)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sent)


def adopt_orphans() -> None:
    """Become the parent of every orphan among the descendants, so that this process can reap it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name that `ps` and /proc/PID/comm show for this process; 15 bytes at most."""
    _prctl(_PR_SET_NAME, name.encode())


def children() -> list[int]:
    """Return the pids of all children, adopted orphans and zombies included."""
    return [pid for pid, fields in all_stats().items() if int(fields[1]) == os.getpid()]


def end_children(timeout_s: float) -> None:
    """Kill all children, and then the orphans that they leave to this process (see `adopt_orphans`)."""
    deadline = time.monotonic() + timeout_s
    while (left := children()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap_orphans(but: Collection[int]) -> None:
    """Reap the adopted orphans that have ended (see `adopt_orphans`), but not the pids in `but`."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in but:
                return  # Its owner reaps it after the SIGCHLD.
            os.waitpid(ended.si_pid, 0)


def start_bound(
    command: Sequence[str], death_signal: signal.Signals, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `command` in its own session; it gets `death_signal` when the calling thread dies."""
    parent = os.getpid()
    # Until the child has left our process group, a signal to the group reaches it too. The child would write
    # it into our wake-up pipe, and one Ctrl-C would count as two.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_A_TERMINAL)

    def bind() -> None:
        with suppress(ValueError):  # Only the main thread of a program has a wake-up pipe.
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
    """Send `sent` to the process group of `leader`; do nothing if the group is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sent)


def end_group_of_dead(leader: int, timeout_s: float) -> None:
    """Kill the processes that a dead child has left in its group, and let its resource tracker finish.

    `multiprocessing` starts a tracker beside a program that uses shared memory. The tracker removes what the
    program has left there, once the other processes are gone. Killed before, it would leave that in the
    machine's memory, and the next program could not use the same names.

    Args:
        leader: pid of the child, which nobody has reaped yet: its group can't be another process's.
        timeout_s: for the tracker, before it is killed as well.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        orphans = _orphans_in(leader)
        trackers = [pid for pid in orphans if _may_be_tracker(pid)]
        if not trackers:
            break
        for pid in set(orphans) - set(trackers):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    signal_group(leader, signal.SIGKILL)


def _orphans_in(group: int) -> list[int]:
    """Return the adopted orphans in a process group that run (see `adopt_orphans`); none if unknown."""
    listed = PROC / str(os.getpid()) / "task" / str(os.getpid()) / "children"  # far fewer than in /proc
    with suppress(OSError):
        pids = [int(pid) for pid in listed.read_text(encoding="ascii").split()]
        stats = {pid: fields for pid in pids if (fields := stat(pid))}
        return [pid for pid, fields in stats.items() if int(fields[2]) == group and fields[0] != "Z"]
    return []


def _may_be_tracker(pid: int) -> bool:
    with suppress(OSError):
        command_line = (PROC / str(pid) / "cmdline").read_bytes()
        # The kernel shows no command line during an exec. The program that started the tracker does not wait
        # for the end of the exec: it can be dead by now.
        return not command_line or b"multiprocessing.resource_tracker" in command_line
    return False


def peak_memory_bytes() -> int:
    """Return the most bytes of physical memory that this process has held at once; 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in (PROC / "self" / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def usable_cpus() -> int:
    """Return the number of CPUs to which this process is bound."""
    return len(os.sched_getaffinity(0))


class OpenFiles:
    """The limit of open files of this process, and the limit that it had at its start."""

    first: int | None = None
    """The soft limit before `allow_most` raised it, for sbatch: it hands its limits on to the job."""

    @classmethod
    def allow_most(cls) -> int:
        """Raise the soft limit to the hard limit, and return it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            cls.first = soft
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard


def age_s() -> float:
    """Return the seconds since this process was forked; 0.0 if the kernel does not say.

    srun and the local launcher start a program right after the fork.
    """
    try:
        started = int((stat(os.getpid()) or [])[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


REAPER_NAME = "ddp-reaper"
"""The orphan reaper's name in /proc/PID/comm; its command line is the command line of its parent."""
_SLOTS = 1024
_PARENT_IS_GONE = signal.SIGHUP
_POLLED_S = 0.1


class OrphanReaper:
    """A process that outlives its parent to kill the parent's process groups; this is the parent's handle.

    When an agent is killed, the kernel kills its ranks, but not the processes that the ranks started: data
    workers, servers. SLURM finds such orphans only if it tracks jobs by control groups. The reaper also ends
    the agents of a local launcher that was killed. A table in shared memory holds the groups that it kills.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        """Start the reaper, before the parent allocates memory and opens files.

        Args:
            patience_s: seconds after the parent's death before the reaper kills the groups.
        """
        self._leaders = memoryview(mmap.mmap(-1, 4 * _SLOTS)).cast("i")
        parent = os.getpid()
        # The reaper reacts only to its parent's death and to SIGKILL.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _reap(parent, self._leaders, patience_s)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def add(self, leader: int) -> None:
        """Kill the process group of `leader` if this process dies."""
        self._leaders[self._slot(0)] = leader

    def forget(self, leader: int) -> None:
        """Spare a group; call this before the kernel can give the leader's number to another"""
        self._leaders[self._slot(leader)] = 0

    def _slot(self, content: int) -> int:
        return next(slot for slot in range(_SLOTS) if self._leaders[slot] == content)

    def signals_seen(self) -> frozenset[int]:
        """Return the signals that others have sent to the processes below the parent, by number.

        Some sites let SLURM signal every process of a step, most only its tasks. The reaper blocks all
        signals, so those that reach it wait and can be seen, before any process below the parent can react.
        """
        return _signals_of(self.pid, "ShdPnd")

    def close(self) -> None:
        """End the reaper, if it still runs."""
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


def _reap(parent: int, leaders: memoryview, patience_s: float) -> NoReturn:
    try:
        os.setsid()  # A signal to the parent's group must not reach the reaper.
        set_name(REAPER_NAME)
        die_with_parent(_PARENT_IS_GONE, parent)
        os.closerange(0, 1 << 16)
        while os.getppid() == parent:  # `scancel --signal=HUP` may reach the reaper as well.
            signal.sigwait({_PARENT_IS_GONE})
        left, until = list(filter(None, leaders)), time.monotonic() + patience_s
        while left and time.monotonic() < until:
            time.sleep(_POLLED_S)
            left = [leader for leader in left if exists(-leader)]
        for leader in left:
            signal_group(leader, signal.SIGKILL)  # All processes of the group get it at once.
    finally:
        os._exit(0)
