"""A process that outlives its parent by a moment, to end what is left of that.

When an agent is killed, the kernel kills its ranks, but not what these have started: data workers, servers.
SLURM finds such orphans where it tracks jobs by control groups; elsewhere, and on a laptop, nobody does. Nor
does anybody end the agents of a local launcher that was killed, should their ranks never come to leave.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from contextlib import suppress
from typing import NoReturn

from slurmddp.host import process
from slurmddp.host import process as linux

NAME = "ddp-guardian"
"""What it is called in /proc/PID/comm; its command line is that of its parent."""
_SLOTS = 1024
_PARENT_IS_GONE = signal.SIGHUP
_POLLED_S = 0.1


class Guardian:
    """The parent's handle; a table in shared memory tells the process which groups it is to end."""

    def __init__(self, patience_s: float = 0.0) -> None:
        """Start the process: before the parent has grown, and has opened what must be closed at its death.

        The groups have `patience_s` to end by themselves.
        """
        self._leaders = memoryview(mmap.mmap(-1, 4 * _SLOTS)).cast("i")
        parent = os.getpid()
        # Nothing is for the guardian but its parent's death, and SIGKILL.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _guard(parent, self._leaders, patience_s)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def add(self, leader: int) -> None:
        """End the process group of `leader` should this process die."""
        self._leaders[self._slot(0)] = leader

    def forget(self, leader: int) -> None:
        """Leave a group alone; to be called while its leader's number can't be another process's."""
        self._leaders[self._slot(leader)] = 0

    def _slot(self, content: int) -> int:
        return next(slot for slot in range(_SLOTS) if self._leaders[slot] == content)

    def close(self) -> None:
        """End the process, which may have been ended by others."""
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


def _guard(parent: int, leaders: memoryview, patience_s: float) -> NoReturn:
    try:
        os.setsid()  # Whoever kills the parent's group must not hit this process with it.
        linux.call_oneself(NAME)
        linux.die_with_parent(_PARENT_IS_GONE, parent)
        os.closerange(0, 1 << 16)
        while os.getppid() == parent:  # `scancel --signal=HUP` may reach this process as well.
            signal.sigwait({_PARENT_IS_GONE})
        left, until = list(filter(None, leaders)), time.monotonic() + patience_s
        while left and time.monotonic() < until:
            time.sleep(_POLLED_S)
            left = [leader for leader in left if process.exists(-leader)]
        for leader in left:
            linux.signal_group(leader, signal.SIGKILL)  # A process can't fork out of it: all have it at once.
    finally:
        os._exit(0)
