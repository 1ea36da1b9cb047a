"""Let a command that takes a run take a sweep as well: it acts on each run of the sweep."""

from __future__ import annotations

from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder


def runs_of(name: str) -> list[RunFolder]:
    """Return the run with this name, or the started runs of the sweep with this name."""
    sweep = sweeps.find(name)
    return [index.find(name)] if sweep is None else sweep.started
