"""Write the report of a run, or of a sweep and its runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import SlurmddpError, plain
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, foreign_owner, refuse_foreign
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.slurm.client import SlurmClient


@dataclass(frozen=True, kw_only=True)
class Reported:
    """The paths of the HTML pages that `report` wrote for a run or a sweep."""

    name: str
    """Full name of the run or the sweep."""
    is_sweep: bool
    path: Path
    """Path of the HTML page."""
    runs: tuple[Path, ...] = ()
    """Paths of the pages of a sweep's runs."""


def report(name: str | None = None, *, reuse: bool = False, slurm: SlurmClient | None = None) -> Reported:
    """Write the HTML report of a run, or the reports of a sweep's runs and a page that compares the runs.

    Args:
        name: name of a run or a sweep, the beginning of a name, or a run folder; None: the newest run.
        reuse: whether to return the existing report, without writing, if another account owns the run.
        slurm: the client of the SLURM to which the runs belong; None: the SLURM of this machine.

    Raises:
        RunNotFoundError: the name matches no run or sweep, or several.
        ConfigError: another account owns a run, and `reuse` is false or the run has no report.
        SlurmddpError: matplotlib is missing, or a report can't be written.
    """
    sweep = sweeps.find_to_show(name)
    if sweep is not None:
        return _of_sweep(sweep, slurm or SlurmClient())

    folder = index.find(name)
    path = folder.report_file
    if not (reuse and path.exists() and foreign_owner(folder.path) is not None):
        path = _of_run(folder, *statuses([folder], slurm or SlurmClient()))

    return Reported(name=folder.name, is_sweep=False, path=path)


def _of_run(folder: RunFolder, run: RunStatus) -> Path:
    from slurmddp.runs.report.html import write_report

    refuse_foreign(folder.path, READ_ONLY)
    with _explained(folder.name):
        return write_report(folder, run)


def _of_sweep(sweep: sweeps.Sweep, slurm: SlurmClient) -> Reported:
    """Write the reports of the runs of a sweep, and the page of the sweep, which compares them."""
    from slurmddp.runs.report.sweep import write_sweep_report

    folders = sweep.started
    runs = statuses(folders, slurm)
    pages = [_of_run(folder, run) for folder, run in zip(folders, runs, strict=True)]

    with _explained(sweep.name):
        page = write_sweep_report(
            sweep.report_file, sweep.name, runs, missing=len(sweep.runs) - len(folders), best=sweep.best
        )

    return Reported(name=sweep.name, is_sweep=True, path=page, runs=tuple(pages))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Convert an OSError of the block to a SlurmddpError: the report of `name` can't be written."""
    try:
        yield
    except OSError as error:
        raise SlurmddpError(
            f"The report of {name} can't be written: {plain(error)}.",
            hint="Check the permissions of the folder, and the free space of its disk.",
        ) from error
