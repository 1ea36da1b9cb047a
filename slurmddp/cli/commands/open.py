"""Open the report of a run or sweep and print its path; --folder only prints the folder of a run.

slurmddp open first                    without a display it only prints the path
cd "$(slurmddp open first --folder)"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmddp.cli.commands.report import written, written_sweep
from slurmddp.errors import EXIT_FINISHED
from slurmddp.host import browser
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import foreign_owner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp open`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="name, its beginning, folder; or a sweep (default: newest run)"
    )
    parser.add_argument("--folder", action="store_true", help="print the run's folder; open nothing")


def run(args: argparse.Namespace) -> int:
    """Print the path of a run or of its report, and open the report where there is a display."""
    if args.folder:
        print(index.find(args.run).path)
        return EXIT_FINISHED
    sweep = sweeps.find_to_show(args.run)
    report = _report_of(index.find(args.run)) if sweep is None else written_sweep(sweep)
    print(report)
    browser.show(report)
    return EXIT_FINISHED


def _report_of(folder: RunFolder) -> Path:
    is_readable = foreign_owner(folder.path) is not None and folder.report_file.exists()
    return folder.report_file if is_readable else written(folder)
