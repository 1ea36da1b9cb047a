"""Open the report of a run and print its path; --folder only prints the run's folder.

slurmddp open first                    without a display it only prints the path
cd "$(slurmddp open first --folder)"
"""

from __future__ import annotations

import argparse
import os
import webbrowser

from slurmddp.cli.commands.report import written
from slurmddp.errors import EXIT_FINISHED
from slurmddp.runs import index
from slurmddp.runs.folder.owner import foreign_owner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp open`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="name, its beginning, or folder (default: the newest run)"
    )
    parser.add_argument("--folder", action="store_true", help="print the run's folder; open nothing")


def run(args: argparse.Namespace) -> int:
    """Print the path of a run or of its report, and open the report where there is a display."""
    folder = index.find(args.run)
    if args.folder:
        print(folder.path)
        return EXIT_FINISHED
    is_readable = foreign_owner(folder.path) is not None and folder.report_file.exists()
    report = folder.report_file if is_readable else written(folder)
    print(report)
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(report.as_uri())
    return EXIT_FINISHED
