"""Write the report of a run, or of a sweep and its runs, and print its path."""

from __future__ import annotations

import argparse

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.report import report
from slurmddp.errors import EXIT_FINISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp report`."""
    add_run(parser, takes_sweep=True, is_required=False)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the report of a run, or of a sweep and all its runs; print its path; return the exit code."""
    result = report(args.run)
    if args.json:
        print_json(result)
    else:
        print(result.path)

    return EXIT_FINISHED
