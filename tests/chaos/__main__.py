"""Disturb trainings at random moments; all must end with the weights of the undisturbed one: `make chaos`.

It happens on a sandbox of its own. Prints what became of each fault, and a table: how many were survived,
how many steps had to be repeated, how long it took until the training went on. Ends with 0 only if all faults
were survived and all weights are equal.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from chaos import table
from chaos.faults import FAULTS, choose
from chaos.runner import Result, Settings
from chaos.runner import run as run_chaos
from chaos.training import Shape
from slurmddp.cli.messages import report as report_error
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, ConfigError, SlurmddpError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.runs.text_format import print_table
from slurmddp.sandbox.machine import can_make_namespaces
from slurmddp.sandbox.plan import SHARED


def make_parser() -> argparse.ArgumentParser:
    """Declare the flags; `make chaos ARGS='--faults 20'` hands them over."""
    parser = argparse.ArgumentParser(
        prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="show the kinds of faults and do nothing")
    add("--faults", type=at_least(1), default=12, metavar="N", help="how many in all (12)")
    add("--kinds", metavar="A,B", help="only these kinds (default: all that work here)")
    add("--seed", type=int, default=0, help="which faults come when follows from it (0)")
    add("--nodes", type=at_least(1), default=2, metavar="N", help="nodes of the training (2)")
    add("--ranks-per-node", type=at_least(1), default=2, metavar="N", help="ranks on each (2)")
    add("--steps", type=at_least(100), default=600, metavar="N", help="steps of each training (600)")
    add("--shared", choices=SHARED, default="", help="let each node mount the project")
    add("--in-place", action="store_true", help="let fallen ranks begin again in the job (default: requeue)")
    add("--limit", type=at_least(1), default=180, metavar="S", help="seconds to wait for a recovery (180)")
    add("--keep", action="store_true", help="keep the run folders and say where they are")
    add("--output", type=Path, metavar="FILE", help="write all figures there after each fault, as JSON")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that refuses smaller ones."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"give at least {least}")
        return int(text)

    return number


def run(args: argparse.Namespace) -> int:
    """Carry out the experiment and return the exit code."""
    if args.list:
        print_table(("KIND", "WHAT"), [(one.name, one.purpose) for one in FAULTS.values()], sys.stdout)
        return EXIT_FINISHED
    settings = _settings(args)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    started = time.monotonic()

    def report(text: str, result: Result) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {text}", file=sys.stderr, flush=True)
        if args.output is not None:
            write_atomic(args.output.absolute(), json.dumps(table.as_json(result), indent=1) + "\n")

    result = run_chaos(settings, report)
    table.print_result(result, sys.stdout)
    if settings.keep is not None:
        print(f"The run folders are in {settings.keep}.", file=sys.stderr)
    return EXIT_FINISHED if result.good else EXIT_FAILED


def _settings(args: argparse.Namespace) -> Settings:
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder for {args.output}.", hint="Make it first.")
    shape = Shape(
        nodes=args.nodes, ranks_per_node=args.ranks_per_node, steps=args.steps, in_place=args.in_place
    )
    return Settings(
        kinds=tuple(choose(args.kinds, root=can_make_namespaces(), shared=bool(args.shared))),
        faults=args.faults,
        seed=args.seed,
        shape=shape,
        limit_s=args.limit,
        keep=Path(tempfile.mkdtemp(prefix="slurmddp-chaos-kept-")) if args.keep else None,
        shared=args.shared,
    )


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Let a signal, also one that a shell's `&` had ignored, take everything down on its way out."""
    raise KeyboardInterrupt


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        return run(make_parser().parse_args())
    except SlurmddpError as error:
        return report_error(error, debug=False)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
