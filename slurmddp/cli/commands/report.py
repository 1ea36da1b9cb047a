"""Write the report of a run and print its path."""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmddp.cli.each_run import for_each_run
from slurmddp.errors import SlurmddpError, plain
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.run_status import status
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
    """Write `report.html` and `report.png` into the run folder."""
    return for_each_run(args, _run)


def _run(args: argparse.Namespace) -> int:
    print(written(index.find(args.run)))
    return 0


def written(folder: RunFolder) -> Path:
    """Write the report of a run, and return its path; raises SlurmddpError if it can't be written."""
    from slurmddp.runs.report.html import write_report

    refuse_foreign(folder.path, READ_ONLY)
    try:
        return write_report(folder, status(folder, SlurmClient()))
    except OSError as error:
        raise SlurmddpError(
            f"The report of {folder.name} can't be written: {plain(error)}.",
            hint="The run folder must be yours, and have free space.",
        ) from error
