"""Explain why a run waits: SLURM's reason, its place in the queue, limits, expected start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.explain import Explanation, Wait, explain
from slurmddp.errors import EXIT_FINISHED
from slurmddp.runs.text_format import paint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp explain`."""
    add_run(parser, is_required=False)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state of a run, the reason why it waits, and advice; return the exit code."""
    result = explain(args.run)
    if args.json:
        print_json(result)
        return EXIT_FINISHED

    print(paint(result.name, "bold", sys.stdout))
    for name, text in _lines(result):
        print(f"  {paint(f'{name:<10}', 'grey', sys.stdout)} {text}")

    return EXIT_FINISHED


def _lines(run: Explanation) -> Iterator[tuple[str, str]]:
    """Yield the lines to print about a run, each as (label, text)."""
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
    """Yield lines about a waiting job, each as (label, text): reason, queue, expected start, limits."""
    yield "reason", wait.reason or "SLURM gives none yet"
    if wait.ahead == 1:
        yield "queue", "1 job of its partition is ahead of it"
    elif wait.ahead is not None:
        yield "queue", f"{wait.ahead or 'no'} jobs of its partition are ahead of it"

    yield "start", f"expected at {wait.start}" if wait.start else "SLURM has no estimate yet"
    for limit in wait.limits:
        yield "limit", str(limit)
