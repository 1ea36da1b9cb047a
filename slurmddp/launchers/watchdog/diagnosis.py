"""Find the rank that holds up or slows the others, from the reports of all agents.

An agent whose ranks hang sends `HangSuspected`. The coordinator then asks all agents for the stacks of their
ranks. The reports tell which rank is stuck, or that no rank is. The agents also send the paces of their ranks
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
"""Seconds for the agents to report. Each agent waits eight seconds at most for its ranks' stacks."""


@dataclass(frozen=True)
class Verdict:
    """A rank that holds up all others."""

    report: RankReport
    cause: Cause
    """Why it fails."""

    def failure(self, agents: Sequence[int], ranks_per_node: int) -> Failure:
        """Return the failure of the stuck rank; `agents` run the ranks, in the order of the ranks."""
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
    """A hang of a worker group, diagnosed from the reports of all its agents."""

    def __init__(self, agents: Iterable[int], now: float) -> None:
        self.deadline = now + _REPORTS_S
        """When to stop waiting for reports."""
        self._awaited = set(agents)
        self._reports: list[RankReport] = []

    def take(self, agent: int, reports: Sequence[RankReport]) -> None:
        """Add the reports of an agent's ranks."""
        if agent in self._awaited:
            self._awaited.discard(agent)
            self._reports += reports

    def is_complete(self, now: float) -> bool:
        """Return whether no report is awaited any more."""
        return not self._awaited or now >= self.deadline

    def verdict(self) -> Verdict | None:
        """Return the stuck rank; None if no rank is stuck."""
        first = first_stopped(self._reports)
        return None if first is None else Verdict(first, why(self._reports, first))


class PaceComparison:
    """The paces of all ranks of a worker group, compared when the paces of all ranks have arrived."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._new: dict[int, Pace] = {}
        self._before: dict[int, Pace] = {}
        self._next_lines: dict[int, float] = {}
        """When each straggler may be reported again, by rank."""
        self._seen: int | None = None
        self._next_pace = 0.0

    def take(self, paces: Mapping[int, Pace], now: float) -> tuple[str | None, Straggler | None]:
        """Add the paces of an agent's ranks; return a line for the log, and a straggler if it is a new one.

        A rank is a straggler if it is the slowest twice in a row.
        """
        self._new |= paces
        if len(self._new) < self._ranks:
            return None, None
        means = per_step(self._new, self._before)
        if self._before and not means:
            return None, None
        self._before, self._new = self._new, {}
        found = straggler(means)
        again = found is not None and found.rank == self._seen
        self._seen = None if found is None else found.rank
        if found is not None and again and now >= self._next_lines.get(found.rank, 0.0):
            is_new = found.rank not in self._next_lines
            self._next_lines[found.rank] = now + PACE_EVERY_S
            return found.line, found if is_new else None
        if now >= self._next_pace:
            line = pace_line(means)
            self._next_pace = now + PACE_EVERY_S if line else self._next_pace
            return line, None
        return None, None
