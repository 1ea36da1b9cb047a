"""Compare two runs: the settings in which they differ, and their results."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.diff import diff
from slurmddp.errors import EXIT_FINISHED
from slurmddp.runs.report.differing_settings import as_text
from slurmddp.runs.text_format import number, percent, print_table

_MISSING = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp diff`."""
    add_run(parser, "first")
    parser.add_argument(
        "second",
        nargs="?",
        metavar="RUN",
        help="second run, named in the same ways (default: the newest run other than the first)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the settings in which two runs differ, and their results."""
    result = diff(args.first, args.second)
    if args.json:
        print_json(result)
        return EXIT_FINISHED

    if result.settings:
        rows = [(key, *map(as_text, values)) for key, values in result.settings.items()]
        print_table(("SETTING", *result.runs), rows, sys.stdout, whole=True)
    else:
        print("All settings are equal.")

    print()
    rows = [(key, *(_result(key, value) for value in values)) for key, values in result.results.items()]
    print_table(("RESULT", *result.runs), rows, sys.stdout, whole=True)

    return EXIT_FINISHED


def _result(key: str, value: Any) -> str:
    """Return the text of a result: a percentage for goodput and mfu, `-` for None."""
    if value is None:
        return _MISSING
    if key in ("goodput", "mfu"):
        return percent(value)
    if isinstance(value, float):
        return number(value)
    return str(value)
