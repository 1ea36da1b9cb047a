"""The worker group of one node: its ranks, started, watched and ended together.

A subclass makes the processes: an agent forks them, `launch()` runs a command.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from slurmddp.errors import EXIT_FINISHED, GOOD_CODES, SlurmddpError
from slurmddp.host import process
from slurmddp.host.cgroups import OomWatch
from slurmddp.launchers.coordinator.messages import StartWorkers
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import Failure
from slurmddp.runs.failures.causes import LEFT_EARLY

_UNKILLABLE_S = 60.0
"""Seconds for killed ranks to end: the kernel needs some to take large memories apart."""
_END_S = 2.0
"""Seconds that `stop` waits for a killed rank. A rank that the kernel holds in I/O is left to SLURM."""
_POLL_S = 0.002


class WorkerGroup(ABC):
    """The ranks of one node, one worker group after the other; all methods belong to the main thread."""

    def __init__(self, ranks_per_node: int, agent: int = 0) -> None:
        self.restart_count = 0
        self.codes: list[int] = []
        """Exit codes of the ranks that this agent has not ended; negative for a signal."""
        self.failed: list[Failure] = []
        """The failures among them."""
        self.left: list[Failure] = []
        """Ranks that exited with 0: too early, if other ranks still needed them."""
        self._ranks_per_node, self._agent = ranks_per_node, agent
        self._node_rank = 0
        self._running: dict[int, int] = {}
        """Local ranks, by pid."""
        self._ended_by_us = False
        self._kill_by = 0.0
        self._oom = OomWatch()

    @abstractmethod
    def _start(self, local_rank: int, order: StartWorkers) -> int:
        """Start one rank as the leader of a process group; return its pid."""

    @abstractmethod
    def _exit_code(self, pid: int) -> int | None:
        """Return the exit code of a rank that has ended, negative for a signal; None while it runs."""

    @abstractmethod
    def _last_lines(self, local_rank: int) -> Sequence[str]:
        """Return the last lines that a rank has printed."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def good_codes(self) -> list[int]:
        """Exit codes of the ranks that ended well."""
        return [code for code in self.codes if code in GOOD_CODES]

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local one."""
        return self._node_rank * self._ranks_per_node + local_rank

    def start(self, order: StartWorkers) -> None:
        """Start the ranks that this node has in a worker group."""
        self._node_rank = order.agents.index(self._agent)
        self.restart_count = order.restart_count
        self.codes, self.failed, self.left, self._ended_by_us = [], [], [], False
        self._oom.begin()
        for local_rank in range(self._ranks_per_node):
            self._running[self._start(local_rank, order)] = local_rank

    def poll(self) -> list[Failure]:
        """Take note of the ranks that have ended since the last call; return the failures among them."""
        ended = {pid: code for pid in self._running if (code := self._exit_code(pid)) is not None}
        failed = []
        for pid, code in ended.items():
            local_rank = self._running.pop(pid)
            self._record_exit(local_rank, code)
            if code == EXIT_FINISHED:
                self.left.append(self._failure(local_rank, code, LEFT_EARLY))
            if not self._ended_by_us:
                self.codes.append(code)
                failed += [] if code in GOOD_CODES else [self._failure(local_rank, code)]
        self.failed += failed
        return failed

    def _record_exit(self, local_rank: int, code: int) -> None:  # noqa: B027
        """Record how a rank ended; a subclass without a run folder does nothing."""

    def _failure(self, local_rank: int, code: int, reason: str = "") -> Failure:
        return capture.here(
            code,
            node_rank=self._agent,
            rank=self.rank(local_rank),
            local_rank=local_rank,
            lines=self._last_lines(local_rank),
            reason=reason,
            generation=self.restart_count,
            oom=self._oom.verdict(),
        )

    def signal(self, sent: signal.Signals) -> None:
        """Send a signal to every rank, not to the processes that ranks have started."""
        for pid in self._running:
            os.kill(pid, sent)

    def stop(self, grace_s: float) -> None:
        """End every rank: send SIGTERM, and SIGKILL after `grace_s`; return when no rank is left."""
        self.poll()  # A rank that has ended before was not ended by this.
        self._ended_by_us = True
        self.signal(signal.SIGTERM)
        self._wait(grace_s)
        self.kill()
        self._wait(_END_S)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.poll()
        while self._running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.poll()

    def kill(self) -> None:
        """Send SIGKILL to every rank and to its processes; `is_gone` tells when they have ended."""
        self._ended_by_us = True
        self._kill_by = time.monotonic() + _UNKILLABLE_S
        for pid in self._running:
            process.signal_group(pid, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Return whether `poll` has seen every rank end; raise SlurmddpError if a rank can't be killed."""
        if self._running and time.monotonic() > self._kill_by:
            raise SlurmddpError(
                f"{len(self._running)} rank(s) on this node can't be ended: the kernel holds them in a call.",
                hint="A file server or a device does not answer; the node may need a restart.",
            )
        return not self._running
