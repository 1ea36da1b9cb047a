"""The flag `--json`: print the result of an action as a document for programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, Protocol

from slurmddp.control.contract import to_json


class ResultOfStart(Protocol):
    """The result of an action that starts runs."""

    @property
    def exit_code(self) -> int: ...


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the flag `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def print_json(result: Any) -> None:
    """Print a result of `slurmddp.control` as JSON."""
    print(json.dumps(to_json(result), indent=2, allow_nan=False))


def start_and_print(args: argparse.Namespace, start: Callable[[], ResultOfStart]) -> int:
    """Run an action that starts runs, print its result with `--json`, and return its exit code.

    With `--json` the lines that the action prints meanwhile go to stderr.
    """
    if not args.json:
        return start().exit_code
    with redirect_stdout(sys.stderr):
        result = start()
    print_json(result)
    return result.exit_code
