"""List the runs of this account, the newest activity first, or the runs of a sweep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.errors import RunNotFoundError, near_matches
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.slurm.client import SlurmClient


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The states of several runs."""

    runs: tuple[RunStatus, ...]
    """The newest activity first; the runs of a sweep in its order."""
    more: int = 0
    """Number of further runs, which the limit left out."""
    sweep: str | None = None
    """Full name of the sweep whose runs these are."""
    points: int = 0
    """Number of runs of the sweep."""
    missing: int = 0
    """Number of runs of the sweep that have no folder."""


def list_runs(
    sweep: str | None = None,
    *,
    name: str = "",
    states: Collection[str] = (),
    limit: int | None = None,
    over_ssh: Sequence[RunStatus] = (),
    slurm: SlurmClient | None = None,
) -> Listing:
    """Return the states of runs. SLURM is asked once for all.

    Args:
        sweep: name of a sweep, or of its runs; None: all runs of this account.
        name: only runs whose names begin so.
        states: only runs in these states; empty: in any.
        limit: so many runs, at most; None: all.
        over_ssh: the runs on other machines, which belong to no sweep of this machine.
        slurm: the SLURM of the runs; None: this machine's.

    Raises:
        RunNotFoundError: there is no such sweep, or there are several.
    """
    chosen = None if sweep is None else find_sweep(sweep)
    paths = paths_of(chosen, name)
    elsewhere = [run for run in over_ssh if chosen is None and run.name.startswith(name)]
    # Only the newest are read, unless their states decide.
    read = paths if states else paths[:limit]
    runs = [*statuses([RunFolder(Path(path)) for path in read], slurm or SlurmClient()), *elsewhere]
    if states:
        runs = [run for run in runs if run.state in states]
    if elsewhere:
        runs.sort(key=lambda run: run.seen or run.created or 0.0, reverse=True)

    listing = Listing(runs=tuple(runs[:limit]), more=len(runs) - len(runs[:limit]) + len(paths) - len(read))
    if chosen is None:
        return listing
    points = len(chosen.runs)
    return replace(listing, sweep=chosen.name, points=points, missing=points - len(chosen.started))


def find_sweep(name: str) -> sweeps.Sweep:
    """Return the sweep with this name, or whose runs have this name.

    Raises:
        RunNotFoundError: there is no such sweep, or there are several.
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
    """Return the paths of the runs of a sweep, or of all runs, whose names begin with `name`."""
    paths = index.run_paths() if sweep is None else [str(folder.path) for folder in sweep.started]
    return [path for path in paths if Path(path).name.startswith(name)]
