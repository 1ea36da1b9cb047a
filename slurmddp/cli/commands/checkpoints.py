"""List the checkpoints of a run, damaged ones too; --verify reads every byte."""

from __future__ import annotations

import argparse
import sys

from slurmddp.checkpoint.files.list_checkpoints import OTHER_VERSION, RENAMED, ListedCheckpoint
from slurmddp.checkpoint.files.space import size_text
from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.checkpoints import Checkpoints, checkpoints
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED
from slurmddp.runs.text_format import local_time, print_table

HEADERS = ("STEP", "STATE", "SIZE", "SAVED", "", "FOLDER")
_STYLES = {"complete": "", "verified": "green", "damaged": "red", OTHER_VERSION: "red"}
_STYLES |= dict.fromkeys(RENAMED, "grey")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp checkpoints`."""
    add_run(parser)
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare it with its checksum"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line for each checkpoint; return 1 if a checkpoint can't be loaded and is not quarantined."""
    result = checkpoints(args.run, verify=args.verify)
    if args.json:
        print_json(result)
    else:
        _print(result)

    unusable = [row for row in result.checkpoints if row.state in ("damaged", OTHER_VERSION)]
    return EXIT_FAILED if unusable else EXIT_FINISHED


def _print(result: Checkpoints) -> None:
    """Print the table of checkpoints, and for each checkpoint that can't be loaded the reason."""
    if not result.checkpoints:
        print(f"There are no checkpoints yet in {result.folder}.", file=sys.stderr)
        return

    rows = [_cells(row) for row in result.checkpoints]
    styles = [_STYLES[row.state] for row in result.checkpoints]
    print_table(HEADERS, rows, sys.stdout, right=frozenset({"STEP", "SIZE"}), styles=styles)

    damaged = [row for row in result.checkpoints if row.state == "damaged"]
    other = [row for row in result.checkpoints if row.state == OTHER_VERSION]
    for row in damaged:
        print(f"{row.path.name} is damaged: {row.problem}", file=sys.stderr)

    for row in other:
        print(f"{row.path.name}: {row.problem}", file=sys.stderr)

    if damaged:
        print("A resume skips damaged checkpoints and loads the newest undamaged one.", file=sys.stderr)


def _cells(row: ListedCheckpoint) -> tuple[str, ...]:
    """Return the table cells that describe a checkpoint, in the order of `HEADERS`."""
    marks: list[str] = []
    if row.latest:
        marks.append("latest")
    if row.best:
        marks.append("best")

    size = size_text(row.bytes)
    return str(row.step), row.state, size, local_time(row.saved), ", ".join(marks), str(row.path)
