"""Write the report of a run, or of a sweep and its runs, and print its path."""

from __future__ import annotations

import argparse

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.control.report import report
from slurmddp.errors import EXIT_FINISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp report`."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="name of the run, its beginning, or the run folder; or a sweep (default: the newest run)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the report of a run, or of a sweep and all its runs; print its path; return the exit code."""
    result = report(args.run)
    if args.json:
        print_json(result)
    else:
        print(result.path)

    return EXIT_FINISHED
