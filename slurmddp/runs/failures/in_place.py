"""The failures after which the ranks of an attempt began again in place, and how far they had come."""

from __future__ import annotations

from dataclasses import dataclass

from slurmddp.runs.failures.model import Failure, read_restarted
from slurmddp.runs.folder.history import Attempt
from slurmddp.runs.folder.layout import RunFolder


@dataclass(frozen=True, kw_only=True)
class Restart(Failure):
    """A failure after which the ranks of an attempt began again in place."""

    reached: int | None = None
    """The last step of the ranks that ended; None where they made none, or nobody saw it."""

    @property
    def after(self) -> str:
        """Say after which step it came: "after step 140"; empty where that is not known."""
        return "" if self.reached is None else f"after step {self.reached}"


def read_restarts(folder: RunFolder, attempt: Attempt) -> tuple[Restart, ...]:
    """Return the restarts of an attempt in their order."""
    return tuple(
        Restart(**vars(failure), reached=attempt.reached[failure.generation])
        for failure in read_restarted(folder, attempt.number)
        if failure.generation in attempt.reached  # Else a stop came before its ranks had begun again.
    )
