"""The runs that an action takes: one run, or the runs of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign


@dataclass(frozen=True)
class Selection:
    """One run, or the runs of a sweep that have a folder."""

    name: str
    """Full name of the run or the sweep."""
    runs: tuple[RunFolder, ...]
    sweep: sweeps.Sweep | None = None
    """The sweep; None if a single run was named."""


def select(name: str) -> Selection:
    """Return the runs that a name means.

    Args:
        name: name of a run or a sweep, the beginning of one, or a run's folder.

    Raises:
        RunNotFoundError: there is no such run or sweep, or there are several.
    """
    sweep = sweeps.find(name)
    if sweep is not None:
        return Selection(sweep.name, tuple(sweep.started), sweep)
    folder = index.find(name)
    return Selection(folder.name, (folder,))


def select_own(name: str) -> Selection:
    """Return the runs that a name means, which this account may change.

    Raises:
        RunNotFoundError: as for `select`.
        ConfigError: another account owns one of the runs.
    """
    selection = select(name)
    for folder in selection.runs:
        refuse_foreign(folder.path, READ_ONLY)
    return selection
