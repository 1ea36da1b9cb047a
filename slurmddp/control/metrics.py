"""Read the metrics that a run has logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmddp.runs import index
from slurmddp.runs.status.metrics import read_steps


@dataclass(frozen=True, kw_only=True)
class LoggedMetrics:
    """The metrics of a run, step by step."""

    name: str
    """Full name of the run."""
    steps: tuple[Mapping[str, int | float], ...]
    """For each logged step its values by name, and `step`, `attempt` and `time`."""


def metrics(name: str | None = None) -> LoggedMetrics:
    """Return the metrics of a run; steps that were repeated after a restart are listed once.

    Args:
        name: name of a run, the beginning of a name, or a run folder; None: the newest run.

    Raises:
        RunNotFoundError: the name matches no run, or several.
    """
    folder = index.find(name)
    return LoggedMetrics(name=folder.name, steps=tuple(read_steps(folder)))
