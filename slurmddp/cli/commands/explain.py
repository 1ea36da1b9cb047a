"""Explain why a run waits: SLURM's reason, its place in the queue, limits, expected start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.control.explain import Explanation, Wait, explain
from slurmddp.errors import EXIT_FINISHED
from slurmddp.runs.text_format import paint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp explain`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="name, its beginning, or folder (default: the newest run)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state of one run, and why it waits or the remedy of its end."""
    result = explain(args.run)
    if args.json:
        print_json(result)
        return EXIT_FINISHED
    print(paint(result.name, "bold", sys.stdout))
    for name, text in _lines(result):
        print(f"  {paint(f'{name:<10}', 'grey', sys.stdout)} {text}")
    return EXIT_FINISHED


def _lines(run: Explanation) -> Iterator[tuple[str, str]]:
    yield "state", f"{run.state}: {run.detail}"
    if run.advice:
        yield "next", run.advice
    if run.failure is not None:
        yield "failure", run.failure.sentence
        if run.failure.advice:
            yield "", run.failure.advice
    if run.wait is not None:
        yield from _of_wait(run.wait)


def _of_wait(wait: Wait) -> Iterator[tuple[str, str]]:
    yield "reason", wait.reason or "none yet"
    if wait.ahead is not None:
        waiting = "1 job waits" if wait.ahead == 1 else f"{wait.ahead or 'no'} jobs wait"
        yield "queue", f"{waiting} before it in its partition"
    yield "start", f"expected at {wait.start}" if wait.start else "SLURM gives no expected start"
    for limit in wait.limits:
        yield "limit", str(limit)
