"""List your runs, the most recently active first, or the runs of one sweep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.errors import RunNotFoundError
from slurmddp.near_matches import near_matches
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.slurm.client import SlurmClient


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The statuses of the runs of this account, or of the runs of a sweep."""

    runs: tuple[RunStatus, ...]
    """The most recently active run first; the runs of a sweep in the order of its points."""
    more: int = 0
    """Number of runs that were left out because of `limit`."""
    sweep: str | None = None
    """Full name of the sweep; None if runs of all sweeps are listed."""
    points: int = 0
    """Number of points of the sweep."""
    missing: int = 0
    """Number of points of the sweep without a run folder."""


def list_runs(
    sweep: str | None = None,
    *,
    name: str = "",
    states: Collection[str] = (),
    limit: int | None = None,
    over_ssh: Sequence[RunStatus] = (),
    slurm: SlurmClient | None = None,
) -> Listing:
    """Return the statuses of the runs of this account or of a sweep, with one query of SLURM for all.

    Args:
        sweep: name of a sweep, or the `name=` of its runs; None: all runs of this account.
        name: only runs whose names begin with this text are listed.
        states: only runs in one of these states are listed; empty: all states.
        limit: the largest number of runs; None: all runs.
        over_ssh: the statuses of runs on other machines. They belong to no sweep of this machine.
        slurm: the client of the SLURM to which the runs belong; None: the SLURM of this machine.

    Raises:
        RunNotFoundError: the name matches no sweep, or several.
    """
    chosen = None if sweep is None else find_sweep(sweep)
    paths = paths_of(chosen, name)
    remote_runs = [run for run in over_ssh if chosen is None and run.name.startswith(name)]

    # Reading a status is slow, so only the newest `limit` runs are read. A filter by state needs the status
    # of all runs.
    read = paths if states else paths[:limit]
    runs = [*statuses([RunFolder(Path(path)) for path in read], slurm or SlurmClient()), *remote_runs]
    if states:
        runs = [run for run in runs if run.state in states]
    if remote_runs:
        runs.sort(key=lambda run: run.seen or run.created or 0.0, reverse=True)

    listing = Listing(runs=tuple(runs[:limit]), more=len(runs) - len(runs[:limit]) + len(paths) - len(read))
    if chosen is None:
        return listing

    points = len(chosen.runs)
    return replace(listing, sweep=chosen.name, points=points, missing=points - len(chosen.started))


def find_sweep(name: str) -> sweeps.Sweep:
    """Return the sweep with this name, or the sweep whose runs have this `name=`.

    Raises:
        RunNotFoundError: the name matches no sweep, or several.
    """
    sweep = sweeps.find_to_show(name)
    if sweep is None:
        raise RunNotFoundError(
            f"There is no sweep {name!r}.",
            hint=near_matches(name, sweeps.names())
            or f"`slurmddp train -m seed=1,2` starts one. `slurmddp list --name {name}` lists runs.",
        )

    return sweep


def paths_of(sweep: sweeps.Sweep | None, name: str = "") -> list[str]:
    """Return the paths of run folders whose names begin with `name`.

    Args:
        sweep: the sweep whose runs are considered; None: all runs of this account.
        name: the beginning of the names.
    """
    paths = index.run_paths() if sweep is None else [str(folder.path) for folder in sweep.started]
    return [path for path in paths if Path(path).name.startswith(name)]
