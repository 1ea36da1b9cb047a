"""Write the report of a run, or of a sweep and its runs, and print its path."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurmddp.errors import EXIT_FINISHED, SlurmddpError, plain
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.run_status import RunStatus, status, statuses
from slurmddp.slurm.client import SlurmClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp report`."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="name, its beginning, folder; or a sweep (default: newest run)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report of a run, or the reports of a sweep's runs and the page that compares them."""
    sweep = sweeps.find_to_show(args.run)
    print(written(index.find(args.run)) if sweep is None else written_sweep(sweep))
    return EXIT_FINISHED


def written(folder: RunFolder) -> Path:
    """Write the report of a run, and return its path; raises SlurmddpError if it can't be written."""
    return _write(folder, status(folder, SlurmClient()))


def _write(folder: RunFolder, found: RunStatus) -> Path:
    from slurmddp.runs.report.html import write_report

    refuse_foreign(folder.path, READ_ONLY)
    with _explained(folder.name):
        return write_report(folder, found)


def written_sweep(sweep: sweeps.Sweep) -> Path:
    """Write the reports of a sweep's runs and the page that compares them; return the page's path."""
    from slurmddp.runs.report.sweep import write_sweep_report

    folders = sweep.started
    found = statuses(folders, SlurmClient())
    for folder, one in zip(folders, found, strict=True):
        _write(folder, one)
    with _explained(sweep.name):
        return write_sweep_report(
            sweep.report_file, sweep.name, found, missing=len(sweep.runs) - len(folders), best=sweep.best
        )


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SlurmddpError(
            f"The report of {name} can't be written: {plain(error)}.",
            hint="The run folder must be yours, and have free space.",
        ) from error
