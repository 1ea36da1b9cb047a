"""Find the runs that a name selects: one run, or the runs of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign


@dataclass(frozen=True)
class Selection:
    """The runs that a name selects: one run, or the runs of a sweep that have a folder."""

    name: str
    """Full name of the run or the sweep."""
    runs: tuple[RunFolder, ...]
    sweep: sweeps.Sweep | None = None
    """The sweep; None if the name is the name of a run."""


def select(name: str) -> Selection:
    """Find the run or the sweep with a name, and return its runs.

    Args:
        name: name of a run or a sweep, the beginning of a name, or a run folder.

    Raises:
        RunNotFoundError: the name matches no run or sweep, or several.
    """
    sweep = sweeps.find(name)
    if sweep is not None:
        return Selection(sweep.name, tuple(sweep.started), sweep)

    folder = index.find(name)
    return Selection(folder.name, (folder,))


def select_own(name: str) -> Selection:
    """Return the runs that a name selects, for an action that only the owner of the runs may do.

    Raises:
        RunNotFoundError: the name matches no run or sweep, or several.
        ConfigError: another account owns one of the runs.
    """
    selection = select(name)
    for folder in selection.runs:
        refuse_foreign(folder.path, READ_ONLY)

    return selection
