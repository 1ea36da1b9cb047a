"""A process that outlives its agent by a moment, to end what the ranks have started.

When an agent is killed, the kernel kills its ranks, but not what these have started: data workers, servers.
SLURM finds such orphans where it tracks jobs by control groups; elsewhere, and on a laptop, nobody does.
"""

from __future__ import annotations

import mmap
import os
import signal
from contextlib import suppress
from typing import NoReturn

from slurmddp.launchers import linux

NAME = "ddp-guardian"
"""What it is called in /proc/PID/comm; its command line is that of its agent."""
_SLOTS = 1024
_AGENT_IS_GONE = signal.SIGHUP


class Guardian:
    """The agent's handle; a table in shared memory tells the process which groups it is to end."""

    def __init__(self) -> None:
        """Start the process: before the agent has grown, and has opened what must be closed at its death."""
        self._leaders = memoryview(mmap.mmap(-1, 4 * _SLOTS)).cast("i")
        agent = os.getpid()
        # Nothing is for the guardian but the agent's death, and SIGKILL.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _guard(agent, self._leaders)
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


def _guard(agent: int, leaders: memoryview) -> NoReturn:
    try:
        os.setsid()  # Whoever kills the agent's group must not hit this process with it.
        linux.call_oneself(NAME)
        linux.die_with_parent(_AGENT_IS_GONE, agent)
        os.closerange(0, 1 << 16)
        while os.getppid() == agent:  # `scancel --signal=HUP` may reach this process as well.
            signal.sigwait({_AGENT_IS_GONE})
        for leader in filter(None, leaders):
            linux.signal_group(leader, signal.SIGKILL)  # A process can't fork out of it: all have it at once.
    finally:
        os._exit(0)
