"""Handle the flag `--json`: print the result of an action as a JSON document."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, Protocol

from slurmddp.errors import UsageError


class ResultOfStart(Protocol):
    """The result of an action that starts runs; it has the exit code of the command."""

    @property
    def exit_code(self) -> int: ...


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the flag `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def print_json(result: Any) -> None:
    """Print a result of `slurmddp.control` as JSON."""
    # Imported here, because most calls of a command print no JSON.
    from slurmddp.control.json_encoding import to_json

    print(json.dumps(to_json(result), indent=2, allow_nan=False))


def start_and_print(args: argparse.Namespace, start: Callable[[], ResultOfStart]) -> int:
    """Call `start`, print its result as JSON if `--json` is given, and return the result's exit code."""
    with lines_beside_json(args):
        result = start()

    if args.json:
        print_json(result)

    return result.exit_code


@contextmanager
def lines_beside_json(args: argparse.Namespace) -> Iterator[None]:
    """Redirect stdout to stderr inside the block if `--json` is given.

    Then stdout holds only the JSON document that is printed after the block.
    """
    if not args.json:
        yield
        return

    with redirect_stdout(sys.stderr):
        yield


def refuse_json_of_text(args: argparse.Namespace) -> None:
    """Raise UsageError if `--json` is combined with a flag that prints a configuration."""
    for flag in ("cfg", "info"):
        if args.json and getattr(args, flag):
            raise UsageError(
                f"--json prints the result of a start, but --{flag} starts nothing and prints text.",
                hint=f"Omit --json or --{flag}.",
            )
