"""The rank processes of one node: how the agent starts them, watches them, and ends them.

A fork shares what the agent has imported, so eight ranks cost one import of torch. Where an import has done
what a fork does not survive, ranks are programs of their own, and import for themselves. Each rank leads a
process group: whatever it starts (data loader workers, say) is found and ended with it.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from slurmddp.host import process
from slurmddp.host.orphans import Guardian
from slurmddp.host.signals import STOP_SIGNALS, SignalInbox
from slurmddp.launchers.agent.preload import why_no_fork
from slurmddp.launchers.agent.worker import GOOD_CODES, RankStart, be_rank, spawn

_UNKILLABLE_S = 2.0
"""How long a killed process is waited for; one that the kernel holds in I/O is left to SLURM."""


@dataclass(frozen=True)
class RankExit:
    """One ended rank; `returncode` is negative for a signal, as in `subprocess`."""

    local_rank: int
    returncode: int

    @property
    def good(self) -> bool:
        return self.returncode in GOOD_CODES


class Ranks:
    """The ranks of one node that run, by pid; all methods belong to the thread that forks."""

    def __init__(self, inbox: SignalInbox) -> None:
        self._inbox = inbox
        self.in_child: Callable[[], object] = lambda: None
        """Called in every fork, to let it go of what is the agent's."""
        self.on_other: Callable[[int, int], object] = lambda pid, status: None
        """Called with pid and status for every other child that has ended."""
        self.on_exit: Callable[[RankExit], object] = lambda ended: None
        """Called for every rank that has ended, also for those that were told to."""
        self._guardian = Guardian()
        self._running: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self._running)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return tuple(self._running.values())

    def start(self, start: RankStart) -> None:
        """Start one rank; forked, it shares all modules with this process and nothing that changes later."""
        # No signal may reach the child while it still shares the agent's handlers and wake-up pipe.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGINT, signal.SIGCHLD})
        try:
            pid = self._fork(start) if why_no_fork() is None else spawn(start)
            self._running[pid] = start.local_rank
            self._guardian.add(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)  # The child does it too, so the group exists from now on.
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self, start: RankStart) -> int:
        agent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of the idle threads that numpy's BLAS starts; they are not Python's.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            be_rank(start, agent, self._forget_agent)
        return pid

    def _forget_agent(self) -> None:
        self._inbox.forget_in_child()
        self.in_child()

    def signal(self, sent: signal.Signals) -> None:
        """Send `sent` to every rank that runs, not to the processes that ranks have started."""
        for pid in self._running:
            os.kill(pid, sent)

    def reap(self) -> list[RankExit]:
        """Return the ranks that have ended since the last call, with what they left running ended as well."""
        ended = []
        while (pid := _ended_child()) is not None:
            if pid in self._running:
                # The dead leader still holds its pid here, so its group can't be somebody else's.
                process.signal_group(pid, signal.SIGKILL)
                self._guardian.forget(pid)
            _, status = os.waitpid(pid, 0)
            if pid in self._running:
                ended.append(RankExit(self._running.pop(pid), os.waitstatus_to_exitcode(status)))
                self.on_exit(ended[-1])
            else:
                self.on_other(pid, status)
        return ended

    def end(self, grace_s: float) -> None:
        """End every rank: SIGTERM, then after `grace_s` SIGKILL; returns when none is left."""
        self.signal(signal.SIGTERM)
        self._await_end(time.monotonic() + grace_s)
        self.kill()
        self._await_end(time.monotonic() + _UNKILLABLE_S)

    def kill(self) -> None:
        """Send SIGKILL to every rank and to what it has started; `reap` tells when they have ended."""
        for pid in self._running:
            process.signal_group(pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the guardian: no rank runs any more, and none will."""
        self._guardian.close()

    def _await_end(self, deadline: float) -> None:
        self.reap()
        while self._running and time.monotonic() < deadline:
            time.sleep(0.002)
            self.reap()


def _ended_child() -> int | None:
    """Return the pid of a child that has ended and is not yet waited for."""
    with suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found.si_pid if found is not None else None
    return None
