"""Define the records that the coordinator writes; `run_folder_recorder.py` writes them into a run folder."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from slurmddp.launchers.coordinator.restart_policy import Assignment
from slurmddp.runs.failures.failure import Failure

if TYPE_CHECKING:
    from slurmddp.launchers.watchdog.stragglers import Straggler
    from slurmddp.launchers.watchdog.stuck_rank import RankReport


class Recorder:
    """Writes the coordinator's records for people and for later attempts. This base class writes nothing."""

    def log(self, text: str) -> None:
        """Write a line to the log of node 0's agent."""

    def warn(self, text: str) -> None:
        """Write a line to the agent's log, and an event that `slurmddp status` shows as a warning."""

    def awaits(self, nodes: str) -> None:
        """Record that the start of the ranks waits for `nodes`; an empty text records the end of the wait."""

    def restarted(
        self, assignment: Assignment, before: Assignment, cause: Failure, step: int, silent_s: float
    ) -> None:
        """Record a restart of the ranks in the same allocation.

        Args:
            assignment: the worker group that starts.
            before: the worker group that has failed.
            cause: the failure.
            step: the last step that the failed worker group has completed; -1 if it has completed none.
            silent_s: seconds from this step until the restart.
        """

    def continue_without(self, agents: Collection[int]) -> None:
        """Record, for the batch step to read, that the attempt can finish without these nodes."""

    def failed(self, cause: Failure, restart_count: int | None = None) -> None:
        """Record the failure that ends the attempt, unless a failure is recorded already.

        With `restart_count`, record the failure of that worker group, after which the attempt continues.
        """

    def stalled(self, report: RankReport, restart_count: int) -> None:
        """Record a rank that is stuck and so holds up all other ranks."""

    def slow(self, straggler: Straggler, restart_count: int) -> None:
        """Record a rank that is slower than the other ranks."""
