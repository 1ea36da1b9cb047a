"""Requests to stop: from signals, from the stop file, and from a rank that has stopped unasked.

The agent sends each signal to its ranks once. It forwards the first request to the coordinator, so that the
ranks of all nodes stop at the same step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from slurmddp.environments.time_limits import Limits, leave_at
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
_POLL_S, _FILE_POLL_S = 0.1, 1.0
"""Seconds between two polls: while ranks stop, and of the stop file of a script's run."""


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
        self.deadline = 0.0
        """When to call `poll` and `kill_is_near` at the latest, on the monotonic clock."""
        self._workers, self._rules, self._records = workers, rules, records
        self._limits, self._request = limits, request
        self._terminated: float | None = None
        """When SIGTERM came, in seconds since the epoch."""
        self._left_at: dict[int, float] = {}
        """When a rank stopped without a request to this agent, by the restart count of its worker group."""
        self._sent: set[tuple[int, int]] = set()
        """The signals that ranks have got, each with the restart count of their worker group."""

    def receive(self, sent: signal.Signals) -> None:
        """Handle a signal to this agent."""
        if sent == signal.SIGTERM:
            self._terminated = self._terminated or time.time()
        self._stop(signal.SIGTERM if sent == signal.SIGINT else sent, f"received {sent.name}")

    def forward(self, sent: int) -> None:
        """Send the ranks a signal by which the run was asked to stop on another node."""
        self._records.say("the run was asked to stop on another node: passed on to the ranks")
        self._signal_ranks(sent)
        self.is_stopping, self.deadline = True, 0.0

    def note_exit(self, now: float) -> None:
        """Take note that a rank of the present worker group has stopped, here or on another node."""
        if self._workers.restart_count not in self._left_at:
            self._left_at[self._workers.restart_count] = now
            self.deadline = 0.0

    def poll(self, now: float) -> None:
        """Stop the ranks, once, if a rank has stopped unasked, or a script's run has a stop file."""
        left_at = self._left_at.get(self._workers.restart_count)
        self.deadline = now + (_POLL_S if self.is_stopping or left_at is not None else _FILE_POLL_S)
        if self.is_stopping or not self._workers:
            return
        if left_at is not None and now - left_at > _FOLLOW_S:
            self._stop(signal.SIGUSR2, "a rank has stopped alone")
        elif self._rules.is_script and self._records.is_stopped():
            self._stop(signal.SIGUSR2, "the stop file is there")

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
        self.is_stopping, self.deadline = True, 0.0
        if self._workers:
            purpose = "the script decides what it saves" if self._rules.is_script else "for a save and an end"
            self._records.say(f"{why}: passed on to the ranks, {purpose}")
        self._request(sent)

    def _signal_ranks(self, sent: int) -> None:
        """Send a signal to the ranks here, once."""
        once = self._workers.restart_count, sent
        if self._workers and not self._workers.failed and once not in self._sent:
            self._sent.add(once)
            self._workers.signal(signal.Signals(sent))
