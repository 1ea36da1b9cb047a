"""Open the report of a run or sweep and print its path; --folder only prints the folder of a run.

slurmddp open first                    without a display, only print the path of the report
cd "$(slurmddp open first --folder)"   change to the run folder
"""

from __future__ import annotations

import argparse

from slurmddp.cli.run_argument import add_run
from slurmddp.control.report import report
from slurmddp.errors import EXIT_FINISHED
from slurmddp.host import browser
from slurmddp.runs import index


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp open`."""
    add_run(parser, takes_sweep=True, is_required=False)
    parser.add_argument("--folder", action="store_true", help="print the run folder; open nothing")


def run(args: argparse.Namespace) -> int:
    """Print the path of a report, and open it in a browser if there is a display; return the exit code.

    With `--folder`, only print the path of the run folder.
    """
    if args.folder:
        print(index.find(args.run).path)
        return EXIT_FINISHED

    path = report(args.run, reuse=True).path
    print(path)
    browser.show(path)

    return EXIT_FINISHED
