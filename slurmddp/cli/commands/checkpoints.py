"""List the checkpoints of a run, damaged ones too; --verify reads every byte."""

from __future__ import annotations

import argparse
import json
import sys

from slurmddp.checkpoint.files.listing import OTHER_VERSION, RENAMED, Row, find_root, rows
from slurmddp.checkpoint.files.space import size_text
from slurmddp.errors import EXIT_FAILED
from slurmddp.runs.text_format import clock, print_table

HEADERS = ("STEP", "STATE", "SIZE", "SAVED", "", "FOLDER")
_STYLES = {"complete": "", "verified": "green", "damaged": "red", OTHER_VERSION: "red"}
_STYLES |= dict.fromkeys(RENAMED, "grey")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp checkpoints`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder")
    parser.add_argument("--verify", action="store_true", help="compare every byte with what was written")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print one line per checkpoint; return 1 if a checkpoint can't be loaded and is not quarantined."""
    root = find_root(args.run)
    found = rows(root, hashed=args.verify)
    damaged = [row for row in found if row.state == "damaged"]
    other = [row for row in found if row.state == OTHER_VERSION]
    if args.json:
        print(json.dumps([row.as_json() for row in found], indent=2))
    elif not found:
        print(f"There are no checkpoints yet in {root}.", file=sys.stderr)
    else:
        _print(found)
        for row in damaged:
            print(f"{row.path.name} is damaged: {row.problem}", file=sys.stderr)
        for row in other:
            print(f"{row.path.name}: {row.problem}", file=sys.stderr)
        if damaged:
            print("A resume ignores damaged checkpoints and loads the newest good one.", file=sys.stderr)
    return EXIT_FAILED if damaged or other else 0


def _print(found: list[Row]) -> None:
    cells = [
        (
            str(row.step),
            row.state,
            size_text(row.size),
            clock(row.saved),
            "latest" if row.is_latest else "",
            str(row.path),
        )
        for row in found
    ]
    styles = [_STYLES[row.state] for row in found]
    print_table(HEADERS, cells, sys.stdout, right=frozenset({"STEP", "SIZE"}), styles=styles)
