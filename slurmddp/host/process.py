"""Look at the processes of this machine, and let processes end together with their parents.

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
    """Return the fields of /proc/PID/stat (proc(5)) from field 3, the state; None if it can't be read."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The last parenthesis ends the name of the program, which may itself contain parentheses and spaces.
    return text.rpartition(")")[2].split()


def all_stats() -> dict[int, list[str]]:
    """Return the result of `stat` for every process that can be read, by pid."""
    stats = {int(folder.name): stat(int(folder.name)) for folder in PROC.glob("[0-9]*")}
    # Processes that ended after the listing are left out.
    return {pid: fields for pid, fields in stats.items() if fields}


def exists(pid: int) -> bool:
    """Return whether a process exists, even as a zombie; a negative `pid` means a process group."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process exists, but belongs to another account.
        pass
    return True


def handles(pid: int, sent: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal; False if the process is gone."""
    return sent in _signals_of(pid, "SigCgt")


def _signals_of(pid: int, field: str) -> frozenset[int]:
    """Return the numbers of the signals in a field of /proc/PID/status; empty if it can't be read."""
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                # The field is a hexadecimal mask, in which bit 0 stands for signal 1.
                mask = int(line.split()[1], 16)
                return frozenset(bit + 1 for bit in range(mask.bit_length()) if mask >> bit & 1)
    return frozenset()


def start_time(pid: int) -> str | None:
    """Return the boot id and the clock tick of a process's start, as text; None if they can't be read."""
    # The result is not a time of day, which changes when the clock is set. A tick alone could repeat after
    # the next boot.
    fields = stat(pid)
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    if not fields:
        return None
    return f"{boot} {fields[19]}"


def starter(environ: Mapping[str, str], names: Collection[str]) -> int | None:
    """Return the pid of the launcher that has set variables for this process; None if it can't be found.

    The launcher is the nearest ancestor that was itself started with other values of these variables.

    Args:
        environ: the variables of this process.
        names: the variables that the launcher sets.
    """
    values = {name: environ.get(name) for name in names}
    pid = os.getppid()
    fields = stat(pid)

    while fields is not None:
        try:
            # This file holds the variables with which the process was started, without later changes.
            pairs = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return None
        variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        # An ancestor with the same values, such as a shell, has inherited them: continue with its parent.
        if {name: variables.get(name) for name in names} != values:
            return pid

        pid = int(fields[1])
        fields = stat(pid)
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
    """Ask the kernel to send the signal `sent` to this process when its parent dies.

    Args:
        sent: the signal.
        parent: the pid of the parent. If it is given and this parent is already dead, the signal is sent now.
    """
    _prctl(_PR_SET_PDEATHSIG, sent)
    # The parent may have died before the call of prctl, which then sends nothing.
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sent)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, in place of init, so that this process can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name of this process in `ps` and /proc/PID/comm; the kernel cuts it off after 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


def children() -> list[int]:
    """Return the pids of all children, including adopted orphans and zombies."""
    return [pid for pid, fields in all_stats().items() if int(fields[1]) == os.getpid()]


def end_children(timeout_s: float) -> None:
    """Kill and reap all children, and the orphans that they leave to this process (see `adopt_orphans`).

    Return when no child is left, or after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pids = children()
        if not pids:
            break

        for pid in pids:
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
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            # A child in `but` is reaped by the code that started it. Until then, each call of waitid would
            # return this child again, so the loop ends.
            if ended is None or ended.si_pid in but:
                return
            os.waitpid(ended.si_pid, 0)


def start_bound(
    command: Sequence[str], death_signal: signal.Signals, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `command` in its own session; the kernel sends it `death_signal` when the calling thread dies.

    Args:
        command: the program and its arguments.
        death_signal: the signal.
        options: further arguments of `subprocess.Popen`.
    """
    parent = os.getpid()
    # These signals are blocked during the fork: until the child has its own session, a signal to the group
    # reaches the child, too. It would write the signal into the wake-up pipe of this process, and one Ctrl-C
    # would count as two.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_A_TERMINAL)

    def bind() -> None:
        # In another thread than the main thread, set_wakeup_fd raises ValueError; there is no pipe to close.
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
        die_with_parent(death_signal, parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about a fork in a process with threads, because a lock may be held. `bind`
            # takes no lock, so the warning is ignored.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(command, preexec_fn=bind, start_new_session=True, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_group(leader: int, sent: signal.Signals) -> None:
    """Send the signal `sent` to the process group of `leader`; do nothing if the group is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sent)


def end_group_of_dead(leader: int, timeout_s: float) -> None:
    """Kill the processes in the group of a dead child, but first let its `multiprocessing` tracker finish.

    Args:
        leader: the pid of the child. It must not be reaped yet, so that no other process can have this pid.
        timeout_s: seconds until the tracker is killed as well.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        orphans = _orphans_in(leader)
        # `multiprocessing` starts a tracker beside a program that uses shared memory. After the end of the
        # other processes, the tracker removes what the program has left in shared memory. If it were killed
        # before, the memory would stay taken, and the next program could not use the same names.
        trackers = [pid for pid in orphans if _may_be_tracker(pid)]
        if not trackers:
            break

        for pid in set(orphans) - set(trackers):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)

    signal_group(leader, signal.SIGKILL)


def _orphans_in(group: int) -> list[int]:
    """Return the pids of adopted orphans in a process group, without zombies; empty if they can't be read."""
    # This file lists only the children of this process; /proc lists all processes of the machine.
    listed = PROC / str(os.getpid()) / "task" / str(os.getpid()) / "children"
    try:
        pids = [int(pid) for pid in listed.read_text(encoding="ascii").split()]
    except OSError:
        return []

    orphans = []
    for pid in pids:
        fields = stat(pid)
        if fields and int(fields[2]) == group and fields[0] != "Z":
            orphans.append(pid)
    return orphans


def _may_be_tracker(pid: int) -> bool:
    with suppress(OSError):
        command_line = (PROC / str(pid) / "cmdline").read_bytes()
        # An empty command line may be a tracker whose exec is in progress: the program that started it does
        # not wait for the exec, and may have died before it ends.
        return not command_line or b"multiprocessing.resource_tracker" in command_line
    return False


def peak_memory_bytes() -> int:
    """Return the peak of physical memory that this process has used, in bytes; 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in (PROC / "self" / "status").read_text(encoding="utf-8").splitlines():
            # VmHWM is the peak ("high water mark") of the resident set, in kB.
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def usable_cpus() -> int:
    """Return the number of CPUs to which this process is bound."""
    return len(os.sched_getaffinity(0))


class OpenFiles:
    """The limit of open files of this process; keeps the limit that the process had at its start."""

    first: int | None = None
    """The soft limit before `allow_most` raised it; sbatch would pass a raised limit on to the job."""

    @classmethod
    def allow_most(cls) -> int:
        """Raise the soft limit of open files to the hard limit; return the new limit."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            cls.first = soft
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard


def age_s() -> float:
    """Return the seconds since this process was forked, just before its program started; 0.0 if unknown."""
    try:
        started = int((stat(os.getpid()) or [])[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


REAPER_NAME = "ddp-reaper"
"""The name of the orphan reaper in /proc/PID/comm; its command line is the command line of its parent."""
_SLOTS = 1024
_PARENT_IS_GONE = signal.SIGHUP
_POLL_S = 0.1


class OrphanReaper:
    """A handle of the reaper: a child process that kills given process groups when this process dies.

    When an agent is killed, the kernel kills its ranks, but not the processes that the ranks started, such as
    data workers and servers. SLURM finds such orphans only if it tracks jobs by control groups. The reaper
    also ends the agents of a local launcher that was killed.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        """Fork the reaper; call this before the process allocates much memory and opens files.

        Args:
            patience_s: seconds after the parent's death before the reaper kills the groups.
        """
        # The table of process groups is in shared memory: the reaper must see changes after the fork.
        self._leaders = memoryview(mmap.mmap(-1, 4 * _SLOTS)).cast("i")
        parent = os.getpid()

        # All signals stay blocked in the reaper: it waits for the signal of its parent's death, and only
        # SIGKILL ends it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _reap(parent, self._leaders, patience_s)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def add(self, leader: int) -> None:
        """Let the reaper kill the process group of `leader` if this process dies."""
        self._leaders[self._slot(0)] = leader

    def forget(self, leader: int) -> None:
        """Remove the group of `leader`, so that the reaper spares it; call this before the leader is reaped.

        After that, another process may get its pid.
        """
        self._leaders[self._slot(leader)] = 0

    def _slot(self, content: int) -> int:
        return next(slot for slot in range(_SLOTS) if self._leaders[slot] == content)

    def signals_seen(self) -> frozenset[int]:
        """Return the numbers of the signals that the reaper has received, such as signals of SLURM.

        At most sites SLURM signals only the tasks of a step. At some sites it signals every process of the
        step, and so the reaper.
        """
        # The reaper blocks all signals, so they stay pending and can be read here.
        return _signals_of(self.pid, "ShdPnd")

    def close(self) -> None:
        """Kill and reap the reaper, if it still runs; the process groups are spared."""
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


def _reap(parent: int, leaders: memoryview, patience_s: float) -> NoReturn:
    """Run the reaper: wait for the parent's death, then kill the process groups in `leaders`, and exit.

    Args:
        parent: the pid of the parent.
        leaders: the table of process groups; 0 is an empty entry.
        patience_s: seconds in which the groups may end by themselves.
    """
    try:
        # In its own session, the reaper gets no signals that are sent to the parent's group.
        os.setsid()
        set_name(REAPER_NAME)
        die_with_parent(_PARENT_IS_GONE, parent)
        # All descriptors are closed: an open pipe would keep its reader waiting after the parent's death.
        os.closerange(0, 1 << 16)

        # The parent is checked after each signal: `scancel --signal=HUP` may send the same signal while it
        # lives.
        while os.getppid() == parent:
            signal.sigwait({_PARENT_IS_GONE})

        living = list(filter(None, leaders))
        deadline = time.monotonic() + patience_s
        while living and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            living = [leader for leader in living if exists(-leader)]

        # killpg is used, because a signal to a group reaches all its processes at once.
        for leader in living:
            signal_group(leader, signal.SIGKILL)
    finally:
        os._exit(0)
