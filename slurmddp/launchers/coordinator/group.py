"""The present worker group, and the agents' reports about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmddp.launchers.coordinator.messages import HungAtExit
from slurmddp.launchers.coordinator.restart_policy import Assignment
from slurmddp.launchers.watchdog.diagnosis import PaceComparison, StallDiagnosis
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import Failure


@dataclass
class Group:
    """One worker group, as the coordinator knows it."""

    assignment: Assignment
    hangs: StallDiagnosis
    paces: PaceComparison
    step: int = -1
    """Last step that one of its ranks has completed; -1 before the first."""
    stepped_at: float = 0.0
    """When that was, on the coordinator's clock."""
    failures: list[Failure] = field(default_factory=list)
    left: dict[int, Failure] = field(default_factory=dict)
    """Ranks that exited with 0, by their numbers."""
    lost: set[int] = field(default_factory=set)
    """Agents that are gone, and their ranks with them."""
    done: dict[int, int] = field(default_factory=dict)
    """Exit codes of the agents whose ranks have all ended well."""
    hung: dict[int, HungAtExit] = field(default_factory=dict)
    """Newest report of each agent whose last ranks hang at their exit."""
    killing: set[int] = field(default_factory=set)
    """Agents that have not answered `KillWorkers` yet."""

    @classmethod
    def of(cls, restart_count: int, agents: Sequence[int], ranks_per_node: int) -> Group:
        """Return a group of which nothing is known yet."""
        assignment = Assignment(restart_count, tuple(agents))
        return cls(
            assignment, StallDiagnosis(assignment.agents), PaceComparison(len(agents) * ranks_per_node)
        )

    @property
    def agents(self) -> set[int]:
        """The agents that run its ranks."""
        return set(self.assignment.agents)

    @property
    def cause(self) -> Failure:
        """The failure that has caused the others."""
        return capture.likely_first([*self.failures, *self.left.values()])

    def reach(self, step: int, at: float) -> None:
        """Take note of the last step that a rank has completed, and of the time `at` which it did."""
        self.step, self.stepped_at = max(self.step, step), max(self.stepped_at, at)

    def hung_at_exit(self) -> dict[int, HungAtExit]:
        """Return the reports of hung ranks by agent, once all other ranks have ended well; empty before."""
        hung = {agent: one for agent, one in self.hung.items() if agent not in self.done and one.reports}
        has_ended_well = bool(self.done) or any(one.codes for one in hung.values())
        return hung if has_ended_well and self.agents <= self.done.keys() | hung.keys() else {}
