"""Requests to stop: from signals, from the stop file, and from a rank that has stopped unasked.

The agent sends each signal to its ranks once. It forwards the first request to the coordinator, so that the
ranks of all nodes stop at the same step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from slurmddp.environments.time_limits import Limits, leave_at
from slurmddp.errors import EXIT_STOPPED
from slurmddp.launchers.agent.worker_group import WorkerGroup
from slurmddp.launchers.coordinator.restart_policy import Rules
from slurmddp.launchers.coordinator.run_folder_recorder import Records

DEAF_SHARE, WRITING_SHARE = 0.8, 0.6
"""Parts of `RESERVE_S` that are left when agents end deaf ranks, and when they give up a checkpoint.

The batch script needs the rest: on a busy host it takes three seconds to write `ended` and to requeue.
"""
_FOLLOW_S = 0.9
"""Seconds for ranks to follow a rank that has stopped unasked.

Ranks that stop together need less. A rank that is signalled before the training tells no other rank.
"""
_POLL_S = 0.1


class StopRequests:
    """The requests to stop of one attempt, as one node's agent sees them.

    Args:
        workers: the ranks of this node.
        rules: the rules of the run.
        records: the records of the attempt.
        limits: when SLURM kills the job.
        request: forwards the first request to the coordinator, with a signal for the ranks of other nodes.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        rules: Rules,
        records: Records,
        limits: Limits,
        request: Callable[[signal.Signals], object],
    ) -> None:
        self.is_stopping = False
        self._workers, self._rules, self._records = workers, rules, records
        self._limits, self._request = limits, request
        self._terminated: float | None = None
        """When SIGTERM came, in seconds since the epoch."""
        self._left_at: float | None = None
        """When a rank of the present worker group stopped without a request to this agent."""
        self._sent: set[int] = set()
        """Signals that the present ranks have got."""

    def begin_group(self) -> None:
        """Forget what the ranks of the worker group before got and did."""
        self._left_at, self._sent = None, set()

    def receive(self, signals: Sequence[signal.Signals]) -> None:
        """Handle the signals to this agent."""
        for sent in signals:
            if sent == signal.SIGCHLD:
                continue
            if sent == signal.SIGTERM:
                self._terminated = self._terminated or time.time()
            self._stop(signal.SIGTERM if sent == signal.SIGINT else sent, f"received {sent.name}")

    def forward(self, sent: int) -> None:
        """Send the ranks a signal by which the run was asked to stop on another node."""
        self._records.say("the run was asked to stop on another node: passed on to the ranks")
        self._signal_ranks(sent)
        self.is_stopping = True

    def note_exits(self, codes: Sequence[int], now: float) -> None:
        """Take note of exit codes of ranks, here or on another node."""
        if EXIT_STOPPED in codes and self._left_at is None:
            self._left_at = now

    def poll(self, now: float) -> None:
        """Stop the ranks, once, if a rank has stopped unasked, or a script's run has a stop file."""
        if self.is_stopping or not self._workers:
            return
        if self._left_at is not None and now - self._left_at > _FOLLOW_S:
            self._stop(signal.SIGUSR2, "a rank has stopped alone")
        elif self._rules.is_script and self._records.is_stopped():
            self._stop(signal.SIGUSR2, "the stop file is there")

    def next_deadline(self, now: float) -> float | None:
        """Return when to call `poll` and `kill_is_near` at the latest; None if nothing is due."""
        return now + _POLL_S if self.is_stopping or self._left_at is not None else None

    def kill_is_near(self, share: float = DEAF_SHARE) -> bool:
        """Return whether less than `share` of `RESERVE_S` is left until SLURM kills the job."""
        if self._terminated is None:
            return False
        at = leave_at(self._limits, self._terminated, share)
        return at is not None and time.time() >= at

    def _stop(self, sent: signal.Signals, why: str) -> None:
        self._signal_ranks(sent)
        if self.is_stopping:
            return
        self.is_stopping = True
        if self._workers:
            self._records.say(f"{why}: passed on to the ranks, for a save and an end")
        self._request(sent)

    def _signal_ranks(self, sent: int) -> None:
        """Send a signal to the ranks here, once."""
        if self._workers and not self._workers.failed and sent not in self._sent:
            self._sent.add(sent)
            self._workers.signal(signal.Signals(sent))
