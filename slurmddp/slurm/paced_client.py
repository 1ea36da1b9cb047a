"""Query SLURM for the states of jobs at a bounded rate, for a view that stays open for hours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from slurmddp.errors import SlurmError
from slurmddp.slurm.client import IDS_PER_QUERY, SlurmClient
from slurmddp.slurm.states import JobState

QUERY_EVERY_S = 30.0
"""The shortest pause between two queries, in seconds. Sites ask their users not to query SLURM more often."""
LONGEST_PAUSE_S = 300.0
"""The longest pause between two queries while SLURM does not answer, in seconds."""
_TIMEOUT_S = 5.0
"""Seconds after which a query counts as unanswered. The view is not refreshed during a query."""


class PacedClient(SlurmClient):
    """A client whose `jobs` repeats its last answer, or its last error, until the next query is due.

    After an error each pause is twice as long as the pause before, up to `LONGEST_PAUSE_S`.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        # Reports of slow answers are dropped, because their lines would disturb the view.
        super().__init__(timeout_s=_TIMEOUT_S, report=lambda _text: None)
        self._now = now
        self._due = -math.inf
        self._pause = QUERY_EVERY_S
        self._states: dict[str, JobState] = {}
        self._asked: frozenset[str] = frozenset()
        self.not_asked: frozenset[str] = frozenset()
        """Jobs of the last call of `jobs` that were not in the last query to SLURM, which may know them."""
        self.error: SlurmError | None = None
        """The error of the last query; None if SLURM answered."""

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the next query is permitted; None before the first query."""
        return None if self._due == -math.inf else max(0.0, self._due - self._now())

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Return the states of jobs by id from the last query; query first if a query is due.

        Raises:
            SlurmError: SLURM did not answer the last query.
        """
        if self._now() >= self._due:
            self._query(job_ids)

        self.not_asked = frozenset(job_ids) - self._asked
        if self.error is not None:
            raise self.error
        return {job_id: self._states[job_id] for job_id in job_ids if job_id in self._states}

    def _query(self, job_ids: Sequence[str]) -> None:
        self._asked = frozenset(job_ids)
        try:
            self._states = super().jobs(job_ids)
        except SlurmError as error:
            if self.error is not None:
                self._pause *= 2
            self._pause = min(LONGEST_PAUSE_S, self._pause)
            self._states = {}
            self.error = error
        else:
            self.error = None
            # For many jobs one call of `jobs` runs squeue several times, and the pause is that much longer.
            self._pause = QUERY_EVERY_S * math.ceil(len(self._asked) / IDS_PER_QUERY)

        self._due = self._now() + self._pause
