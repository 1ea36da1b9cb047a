"""Find the rank that holds up or slows the other ranks, from the reports of all agents.

An agent whose ranks hang sends `HangSuspected`. The coordinator then asks all agents for the stacks of their
ranks. The reports show which rank is stuck, or that no rank is. The agents also send the paces of their ranks
twice a minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurmddp.launchers.watchdog.stragglers import (
    PACE_EVERY_S,
    Pace,
    Straggler,
    pace_line,
    per_step,
    straggler,
)
from slurmddp.launchers.watchdog.stuck_rank import RankReport, first_stopped, why
from slurmddp.runs.failures.failure import Failure
from slurmddp.runs.failures.kinds import Cause

_REPORTS_S = 15.0
"""Seconds for the agents to report. Each agent waits at most eight seconds for the stacks of its ranks."""


@dataclass(frozen=True)
class Verdict:
    """The result of a diagnosis: the stuck rank, which holds up all other ranks, and the cause to record."""

    report: RankReport
    cause: Cause
    """The kind and the description of the rank's failure."""

    def failure(self, agents: Sequence[int], ranks_per_node: int) -> Failure:
        """Return the failure of the stuck rank.

        Args:
            agents: the node ranks of the agents that run the ranks, in the order of the ranks.
            ranks_per_node: the number of ranks of each agent.
        """
        rank = self.report.rank
        return Failure(
            rank=rank,
            local_rank=rank % ranks_per_node,
            node_rank=agents[rank // ranks_per_node],
            host=self.report.host,
            exit_code=None,
            signal=None,
            time=round(time.time(), 3),
            kind=self.cause.kind,
            reason=self.cause.reason,
            last_lines=self.report.stack,
        )


class StallDiagnosis:
    """Collects the reports of all agents about a suspected hang, and finds the stuck rank in them."""

    def __init__(self, agents: Iterable[int], now: float) -> None:
        self.deadline = now + _REPORTS_S
        """When to stop waiting for reports, on the monotonic clock."""
        self._awaited = set(agents)
        self._reports: list[RankReport] = []

    def take(self, agent: int, reports: Sequence[RankReport]) -> None:
        """Add an agent's reports about its ranks; only its first reports count."""
        # Second reports of an agent would count its ranks twice.
        if agent in self._awaited:
            self._awaited.discard(agent)
            self._reports += reports

    def is_complete(self, now: float) -> bool:
        """Return whether all agents have reported, or the deadline has passed."""
        return not self._awaited or now >= self.deadline

    def verdict(self) -> Verdict | None:
        """Return the stuck rank and the cause, from the reports so far; None if no rank is stuck."""
        first = first_stopped(self._reports)
        if first is None:
            return None
        return Verdict(first, why(self._reports, first))


class PaceComparison:
    """Compares the step times of a worker group's ranks, whenever new times of all ranks have arrived."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._new: dict[int, Pace] = {}
        self._before: dict[int, Pace] = {}
        """The paces of all ranks at the last comparison, by global rank."""
        self._slowest_before: int | None = None
        """The rank that was slow at the last comparison."""
        self._next_lines: dict[int, float] = {}
        """When each straggler may be reported again, by rank."""
        self._next_pace = 0.0
        """When the pace of all ranks is reported again."""

    def take(self, paces: Mapping[int, Pace], now: float) -> tuple[str | None, Straggler | None]:
        """Add the paces of an agent's ranks; compare the ranks once the paces of all ranks have come.

        A rank is a straggler if `straggler` finds it in two consecutive comparisons.

        Args:
            paces: the paces by global rank.
            now: the time, on the monotonic clock.

        Returns:
            A line for the log, or None. The straggler if it is reported for the first time, else None.
        """
        self._new |= paces
        if len(self._new) < self._ranks:
            return None, None

        # A rank has taken too few steps since the last comparison: wait for later paces.
        means = per_step(self._new, self._before)
        if self._before and not means:
            return None, None

        self._before = self._new
        self._new = {}
        slowest = straggler(means)
        if slowest is None:
            self._slowest_before = None
            return self._pace_line(means, now), None

        is_again = slowest.rank == self._slowest_before
        self._slowest_before = slowest.rank
        if not is_again or now < self._next_lines.get(slowest.rank, 0.0):
            return self._pace_line(means, now), None

        is_new = slowest.rank not in self._next_lines
        self._next_lines[slowest.rank] = now + PACE_EVERY_S
        return slowest.line, slowest if is_new else None

    def _pace_line(self, means: Mapping[int, Pace], now: float) -> str | None:
        """Return the log line about the step times of all ranks, once in `PACE_EVERY_S`; else None."""
        if now < self._next_pace:
            return None

        line = pace_line(means)
        if line is not None:
            self._next_pace = now + PACE_EVERY_S
        return line
