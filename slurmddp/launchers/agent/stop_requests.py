"""Handle requests to stop: from signals, from the stop file, and from a rank that has stopped unasked.

Each rank gets a signal once, from the agent or from SLURM. The agent forwards the first request to the
coordinator, so that the ranks of all nodes stop at the same step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from slurmddp.environments.time_limits import TimeLimits, leave_at
from slurmddp.launchers.agent.worker_group import ForkedWorkers
from slurmddp.launchers.coordinator.restart_policy import Rules
from slurmddp.launchers.coordinator.run_folder_recorder import RunFolderRecorder

DEAF_SHARE = 0.8
"""With less than this share of `RESERVE_S` (5 s) until SLURM's SIGKILL, agents end ranks that still run."""
WRITING_SHARE = 0.6
"""With less than this share of `RESERVE_S` left, agents no longer wait for a checkpoint to be written.

The batch script needs this time: on a busy host it takes three seconds to write `ended` and to requeue.
"""
_FOLLOW_S = 0.9
"""Seconds for the other ranks to stop by themselves after a rank has stopped without a request.

Ranks that have agreed on their last step need less. A rank that gets a signal before the training does not
inform the other ranks.
"""
_SLURM_S = 2.0
"""Seconds for a signal that SLURM has sent to the ranks of another node to reach this node's ranks."""
_POLL_S = 0.1
"""Seconds between two polls while ranks stop."""
_FILE_POLL_S = 1.0
"""Seconds between two looks at the stop file of a script's run."""


class StopRequests:
    """Handles the requests to stop the run on one node, in one attempt.

    Args:
        workers: the ranks of this node.
        rules: the rules of the run.
        recorder: the recorder of the attempt.
        limits: the times by which SLURM kills the job.
        request: forwards the first request to the coordinator. Its arguments are a signal for the ranks of
            other nodes, and whether SLURM has sent the signal to the ranks itself.
    """

    def __init__(
        self,
        workers: ForkedWorkers,
        rules: Rules,
        recorder: RunFolderRecorder,
        limits: TimeLimits,
        request: Callable[[signal.Signals, bool], object],
    ) -> None:
        self.is_stopping = False
        self.deadline = 0.0
        """When to call `poll` and `kill_is_near` at the latest, on the monotonic clock."""
        self._workers = workers
        self._rules = rules
        self._recorder = recorder
        self._limits = limits
        self._request = request
        self._terminated: float | None = None
        """When SIGTERM came, in seconds since the epoch."""
        self._left_at: dict[int, float] = {}
        """Monotonic time at which a rank stopped without a request to this agent, by its restart count."""
        self._awaited: tuple[float, signal.Signals] | None = None
        """Deadline for SLURM to signal this node's ranks, and the signal that the agent sends after it."""

    def receive(self, received: signal.Signals) -> None:
        """Send the ranks a signal that this agent has received; report the first one to the coordinator."""
        if received in (signal.SIGTERM, signal.SIGINT):
            self._terminated = self._terminated or time.time()
        self._stop(received, f"received {received.name}")

    def forward(self, requested: signal.Signals, *, by_slurm: bool = False) -> None:
        """Send the ranks of this node the signal with which another node was asked to stop the run.

        Args:
            requested: the signal.
            by_slurm: whether SLURM has sent the signal to the ranks of the other node itself. Then SLURM
                also sends it to the ranks of this node.
        """
        self._recorder.log("another node was asked to stop the run")
        self._workers.expect_stop()
        self.is_stopping = True
        self.deadline = 0.0
        # SLURM also signals the ranks of this node. The agent waits `_SLURM_S` for that signal, so that each
        # rank gets it once.
        if by_slurm:
            self._awaited = time.monotonic() + _SLURM_S, requested
        else:
            self._pass_on(requested)

    def _pass_on(self, requested: signal.Signals) -> None:
        """Send the ranks a signal that another node got, unless SLURM has sent it to them meanwhile."""
        self._signal_ranks(requested)
        self._recorder.log(f"{requested.name} is passed on to the ranks")

    def note_exit(self, now: float) -> None:
        """Note that a rank of the present worker group has stopped, on this node or on another.

        If the run is not asked to stop, `poll` stops the ranks of this node after `_FOLLOW_S`.
        """
        if self._workers.restart_count not in self._left_at:
            self._left_at[self._workers.restart_count] = now
            self.deadline = 0.0

    def poll(self, now: float) -> None:
        """Send the ranks a stop signal if one is due.

        A signal is due if a signal that SLURM should have sent has not come, if another rank has stopped
        unasked, or if the run of a script has a stop file.
        """
        if self._awaited is not None and now >= self._awaited[0]:
            requested = self._awaited[1]
            self._awaited = None
            self._pass_on(requested)

        left_at = self._left_at.get(self._workers.restart_count)
        self.deadline = now + (_POLL_S if self.is_stopping or left_at is not None else _FILE_POLL_S)
        if self.is_stopping or not self._workers:
            return

        if left_at is not None and now - left_at > _FOLLOW_S:
            self._stop(signal.SIGUSR2, "another rank has stopped")
        elif self._rules.is_script and self._recorder.is_stopped():
            self._stop(signal.SIGUSR2, "the run has a stop file")

    def kill_is_near(self, share: float = DEAF_SHARE) -> bool:
        """Return whether SLURM kills the job in less than `share` times `RESERVE_S` (5 s).

        If half of SLURM's KillWait is shorter than `RESERVE_S`, it takes the place of `RESERVE_S`. The result
        is False before SIGTERM or SIGINT has come, and if the time of the kill is not known.
        """
        if self._terminated is None:
            return False
        at = leave_at(self._limits, self._terminated, share)
        return at is not None and time.time() >= at

    def _stop(self, requested: signal.Signals, reason: str) -> None:
        if self._awaited is not None and self._awaited[1] == requested:
            self._awaited = None
            self._pass_on(requested)
            return

        self._signal_ranks(requested)
        if self.is_stopping:
            return

        self.is_stopping = True
        self.deadline = 0.0
        if self._workers:
            purpose = "the script decides what to save" if self._rules.is_script else "which save and exit"
            self._recorder.log(f"{reason}: {requested.name} is passed on to the ranks, {purpose}")
        self._request(requested, requested in self._workers.signals_of_slurm())

    def _signal_ranks(self, requested: signal.Signals) -> None:
        if self._workers and not self._workers.failed:
            self._workers.ask_to_stop(requested)
