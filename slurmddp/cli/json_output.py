"""The flag `--json`: print the result of an action as a document for programs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from slurmddp.control.contract import to_json


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the flag `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def print_json(result: Any) -> None:
    """Print a result of `slurmddp.control` as JSON."""
    print(json.dumps(to_json(result), indent=2, allow_nan=False))
