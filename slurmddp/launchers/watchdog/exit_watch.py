"""Decide whether the ranks of a node hang at their exit, once other ranks of the job ended with 0 or 75.

The threads of a process group may block a rank's exit: torch 2.13 joins gloo's thread while it holds Python's
lock. The watchdog does not judge a rank at its exit, where the program writes no heartbeat. This module reads
the kernel's counters instead: CPU time, bytes read and written, waits for a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmddp.host import process
from slurmddp.host.heartbeat_page import RankHeartbeat
from slurmddp.launchers.watchdog.hang import LONGEST_POLL_S

EXIT_LIMIT_S = 30.0
"""Seconds without activity after which a rank hangs, where policy.stall_timeout_s is null."""
_BUSY_SHARE = 0.1
"""The part of one CPU that counts as work. Twenty threads that wait for Python's lock use 0.07."""
_TICKS = 100
"""Clock ticks per second in /proc/PID/stat (USER_HZ)."""


@dataclass(frozen=True)
class Activity:
    """The kernel's counters for a rank's process and its descendants."""

    cpu_s: float = 0.0
    io_bytes: int = 0
    pids: frozenset[int] = frozenset()
    held: bool = False
    """Whether the rank waits for a disk (state D) or is traced by a debugger."""


class ExitWatch:
    """Measures for how long the ranks of a node have shown no activity at their exit.

    All times are seconds of one monotonic clock.
    """

    def __init__(self, timeout_s: float | None, activity: Callable[[int], Activity] | None = None) -> None:
        """Begin to count the seconds without activity.

        Args:
            timeout_s: the value of policy.stall_timeout_s; None: EXIT_LIMIT_S; 0: no rank ever hangs.
            activity: returns the activity of a pid; None: read it from the kernel.
        """
        self._limit_s = EXIT_LIMIT_S if timeout_s is None else timeout_s
        self._activity = activity or read_activity
        self.forget()

    def forget(self) -> None:
        """Start to count at 0 again, for the ranks of a new worker group."""
        self.silent_s = 0.0
        """Seconds for which no rank has shown activity."""
        self._polled_at: float | None = None
        self._last: dict[int, tuple[Activity, RankHeartbeat]] = {}
        """Activity and heartbeat of each rank at the last poll."""

    def rebase(self) -> None:
        """Ignore the activity since the last poll, in which the ranks have written their stacks."""
        self._last = {}

    def poll(self, ranks: Mapping[int, tuple[int, RankHeartbeat]], now: float) -> bool:
        """Return whether no rank has shown activity for at least the limit.

        Args:
            ranks: the pid and the heartbeat of each rank that runs, by global rank.
            now: the time.
        """
        passed_s = 0.0
        if self._polled_at is not None:
            # Bound the time between two polls, so that a job that SLURM suspends has not hung afterwards.
            passed_s = min(now - self._polled_at, LONGEST_POLL_S)
        self._polled_at = now

        current = {rank: (self._activity(pid), beat) for rank, (pid, beat) in ranks.items()}
        if any(_is_active(self._last.get(rank), state, passed_s) for rank, state in current.items()):
            self.silent_s = 0.0
        else:
            self.silent_s += passed_s

        self._last = current
        return bool(ranks and self._limit_s) and self.silent_s >= self._limit_s


def _is_active(
    last: tuple[Activity, RankHeartbeat] | None, current: tuple[Activity, RankHeartbeat], passed_s: float
) -> bool:
    """Return whether a rank was active between two states `passed_s` seconds apart.

    Args:
        last: the activity and the heartbeat at the last poll; None at the first poll.
        current: the activity and the heartbeat now.
        passed_s: the seconds between them.
    """
    activity, beat = current
    if activity.held:
        return True
    # Only the exit is judged here. `Watchdog` judges the other phases in which a rank shows heartbeats.
    if beat.watched and beat.phase != "ending":
        return True
    if last is None:
        return False

    last_activity, last_beat = last
    # Take the absolute difference: the sum over all processes falls when a descendant ends.
    cpu_s = abs(activity.cpu_s - last_activity.cpu_s)
    if cpu_s >= _BUSY_SHARE * passed_s:
        return True
    if (activity.io_bytes, activity.pids) != (last_activity.io_bytes, last_activity.pids):
        return True
    return (beat.since, beat.steps) != (last_beat.since, last_beat.steps)


def read_activity(pid: int) -> Activity:
    """Return the kernel's counters, summed over the process `pid` and all its descendants."""
    stats = process.all_stats()
    pids = {pid}
    children = {pid}
    while children:
        children = {child for child, fields in stats.items() if int(fields[1]) in children} - pids
        pids |= children

    # utime, stime, cutime and cstime: the times of the process and of its children that have ended.
    ticks = sum(int(field) for member in pids & stats.keys() for field in stats[member][11:15])
    folders = [process.PROC / str(member) for member in pids]
    return Activity(
        cpu_s=ticks / _TICKS,
        io_bytes=sum(map(_io_bytes, folders)),
        pids=frozenset(pids),
        held=any(map(_is_held, folders)),
    )


def _io_bytes(folder: Path) -> int:
    """Return the bytes that a process has read and written by system calls, sockets included.

    The result is 0 if `folder`, its folder in /proc, can't be read.
    """
    # The process may have ended meanwhile.
    with suppress(OSError, ValueError):
        counts = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
        return int(counts["rchar"]) + int(counts["wchar"])

    return 0


def _is_held(folder: Path) -> bool:
    """Return whether a thread of a process waits for a disk (state D) or is traced by a debugger."""
    # The process, or one of its threads, may have ended meanwhile.
    with suppress(OSError):
        for status in folder.glob("task/*/status"):
            text = status.read_text(errors="replace")
            if "\nState:\tD" in text or "\nTracerPid:\t0\n" not in text:
                return True

    return False
