"""Decide whether the ranks of a node hang at their exit, once other ranks of the job have ended well.

The threads of a process group may block a rank's exit: torch 2.13 joins gloo's thread while it holds
Python's lock. The watchdog does not judge a rank there, because the program shows no heartbeat. This module
reads the kernel's counters instead: CPU time, bytes read and written, waits for a disk.
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
"""Part of one CPU that counts as work. Twenty threads that wait for Python's lock use 0.07."""
_TICKS = 100
"""Clock ticks per second in /proc/PID/stat (USER_HZ)."""


@dataclass(frozen=True)
class Activity:
    """Kernel counters of a rank and its descendants."""

    cpu_s: float = 0.0
    io_bytes: int = 0
    pids: frozenset[int] = frozenset()
    held: bool = False
    """Whether the rank waits for a disk (state D) or is traced by a debugger."""


class ExitWatch:
    """Counts the seconds without activity of one node's ranks; times are of one monotonic clock."""

    def __init__(self, timeout_s: float | None, activity: Callable[[int], Activity] | None = None) -> None:
        """`timeout_s` is policy.stall_timeout_s; 0 never finds anything."""
        self._limit_s = EXIT_LIMIT_S if timeout_s is None else timeout_s
        self._activity = activity or read_activity
        self.forget()

    def forget(self) -> None:
        """Start to count again, with other ranks."""
        self.silent_s = 0.0
        self._polled_at: float | None = None
        self._seen: dict[int, tuple[Activity, RankHeartbeat]] = {}

    def rebase(self) -> None:
        """Ignore the activity of the ranks since the last poll: they have answered a request."""
        self._seen = {}

    def poll(self, ranks: Mapping[int, tuple[int, RankHeartbeat]], now: float) -> bool:
        """Return whether all `ranks` (pid and heartbeat of each) have hung for longer than the limit."""
        passed = 0.0 if self._polled_at is None else min(now - self._polled_at, LONGEST_POLL_S)
        self._polled_at = now
        seen = {rank: (self._activity(pid), beat) for rank, (pid, beat) in ranks.items()}
        if any(_is_active(self._seen.get(rank), one, passed) for rank, one in seen.items()):
            self.silent_s = 0.0
        else:
            self.silent_s += passed
        self._seen = seen
        return bool(ranks and self._limit_s) and self.silent_s >= self._limit_s


def _is_active(
    before: tuple[Activity, RankHeartbeat] | None, now: tuple[Activity, RankHeartbeat], passed: float
) -> bool:
    activity, beat = now
    if activity.held or (beat.watched and beat.phase != "ending"):  # The watchdog judges these phases.
        return True
    if before is None:
        return False
    old, old_beat = before
    return (
        abs(activity.cpu_s - old.cpu_s) >= _BUSY_SHARE * passed  # Less than before: a child has ended.
        or (activity.io_bytes, activity.pids) != (old.io_bytes, old.pids)
        or (beat.since, beat.steps) != (old_beat.since, old_beat.steps)
    )


def read_activity(pid: int) -> Activity:
    """Return what the kernel has counted for `pid` and all its descendants."""
    stats, found, below = process.all_stats(), {pid}, {pid}
    while below:
        below = {child for child, fields in stats.items() if int(fields[1]) in below} - found
        found |= below
    folders = [process.PROC / str(one) for one in found]
    return Activity(
        cpu_s=sum(int(ticks) for one in found & stats.keys() for ticks in stats[one][11:15]) / _TICKS,
        io_bytes=sum(map(_io_bytes, folders)),
        pids=frozenset(found),
        held=any(map(_is_held, folders)),
    )


def _io_bytes(folder: Path) -> int:
    """Return the bytes that a process has passed through read and write calls, sockets included."""
    with suppress(OSError, ValueError):
        counts = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
        return int(counts["rchar"]) + int(counts["wchar"])
    return 0


def _is_held(folder: Path) -> bool:
    with suppress(OSError):
        for status in folder.glob("task/*/status"):
            text = status.read_text(errors="replace")
            if "\nState:\tD" in text or "\nTracerPid:\t0\n" not in text:
                return True
    return False
