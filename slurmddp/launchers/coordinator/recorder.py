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
    """Keeps the coordinator's records for people and for later attempts. This base class drops them."""

    def log(self, text: str) -> None:
        """Write a line to the log."""

    def warn(self, text: str) -> None:
        """Write a line to the log, and an event for `slurmddp status`; the attempt continues."""

    def awaits(self, nodes: str) -> None:
        """Record the missing nodes before the ranks start; an empty text ends the wait."""

    def restarted(
        self, assignment: Assignment, before: Assignment, cause: Failure, step: int, silent_s: float
    ) -> None:
        """Record a restart in place.

        Args:
            assignment: the worker group that starts.
            before: the worker group that has failed.
            cause: the failure.
            step: the last step that the failed worker group has completed; -1 if it has completed none.
            silent_s: seconds since this step.
        """

    def continue_without(self, agents: Collection[int]) -> None:
        """Record for the batch step that the attempt can finish without these nodes."""

    def failed(self, cause: Failure, restart_count: int | None = None) -> None:
        """Record the failure that ends the attempt, unless a failure is recorded already.

        With `restart_count`, it is the failure of that worker group, and the attempt continues.
        """

    def stalled(self, report: RankReport, restart_count: int) -> None:
        """Record the rank that holds up all others."""

    def slow(self, straggler: Straggler, restart_count: int) -> None:
        """Record a rank that is slower than the others."""
