"""The orphan reaper: a process that outlives its parent to kill the parent's process groups.

When an agent is killed, the kernel kills its ranks, but not the processes that the ranks started: data
workers, servers. SLURM finds such orphans only if it tracks jobs by control groups. The reaper also ends the
agents of a local launcher that was killed.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from contextlib import suppress
from typing import NoReturn

from slurmddp.host import process

NAME = "ddp-reaper"
"""Its name in /proc/PID/comm; its command line is the command line of its parent."""
_SLOTS = 1024
_PARENT_IS_GONE = signal.SIGHUP
_POLLED_S = 0.1


class OrphanReaper:
    """The parent's handle; a table in shared memory holds the process groups that the reaper kills."""

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
        """Spare a group; call this before the kernel can give the leader's number to another process."""
        self._leaders[self._slot(leader)] = 0

    def _slot(self, content: int) -> int:
        return next(slot for slot in range(_SLOTS) if self._leaders[slot] == content)

    def close(self) -> None:
        """End the reaper, if it still runs."""
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


def _reap(parent: int, leaders: memoryview, patience_s: float) -> NoReturn:
    try:
        os.setsid()  # A signal to the parent's group must not reach the reaper.
        process.set_name(NAME)
        process.die_with_parent(_PARENT_IS_GONE, parent)
        os.closerange(0, 1 << 16)
        while os.getppid() == parent:  # `scancel --signal=HUP` may reach the reaper as well.
            signal.sigwait({_PARENT_IS_GONE})
        left, until = list(filter(None, leaders)), time.monotonic() + patience_s
        while left and time.monotonic() < until:
            time.sleep(_POLLED_S)
            left = [leader for leader in left if process.exists(-leader)]
        for leader in left:
            process.signal_group(leader, signal.SIGKILL)  # All processes of the group get it at once.
    finally:
        os._exit(0)
