"""Show the state and progress of a run, where it runs, and what to do next."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from slurmddp.cli.commands.list import print_listing
from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.listing import Listing
from slurmddp.control.status import RunDetails, status
from slurmddp.errors import EXIT_FINISHED
from slurmddp.runs.report.goodput import Goodput
from slurmddp.runs.status.peak_memory import gib
from slurmddp.runs.text_format import (
    STATE_STYLES,
    duration,
    local_time,
    number,
    paint,
    percent,
    print_table,
    without_control,
)

_SILENT_S = 60.0
"""Seconds since the last heartbeat after which the shown speed is marked as outdated."""
_FAILURE_LINES = 12
"""Number of last lines shown for a failure."""
_RESTARTS = 5
"""Number of restarts in place that are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp status`."""
    add_run(parser, takes_sweep=True, is_required=False)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also show how each attempt ended and where its time went",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state of a run, or the table of a sweep's runs."""
    result = status(args.run)
    if args.json:
        print_json(result)
    elif isinstance(result, Listing):
        print_listing(result)
    else:
        _print(result)
        if args.verbose:
            _print_attempts(result)
            _print_times(result)
            _print_memory(result)

    return EXIT_FINISHED


def _print(run: RunDetails) -> None:
    """Print the name of a run and the lines of `_lines`, each with its label."""
    print(paint(without_control(run.name), "bold", sys.stdout))
    for name, fact in _lines(run):
        text = without_control(fact)
        if name == "state":
            text = f"{paint(run.state, STATE_STYLES[run.state], sys.stdout)}: {text}"
        print(f"  {paint(f'{name:<10}', 'grey', sys.stdout)} {text}")


def _lines(run: RunDetails) -> Iterator[tuple[str, str]]:
    """Yield the lines to print about a run, each as (label, text), the most important first."""
    yield "state", run.detail
    if run.advice:
        yield "next", run.advice
    if run.awaited:
        yield "waiting", run.awaited

    yield from _progress(run)
    if run.goodput.whole:
        label = "time" if run.goodput.share is None else "goodput"
        yield label, _goodput(run.goodput)
        yield "used", f"{run.goodput.hours:,.2f} {run.goodput.unit}"

    yield from _place(run)
    if run.avoided_nodes:
        yield "avoids", f"{', '.join(run.avoided_nodes)}: failed recently"
        if run.active and run.state in ("queued", "stopped") and run.job_id:
            # SLURM keeps the excluded nodes of a waiting job, even if too many other nodes fail meanwhile.
            # So the command that clears them is shown.
            yield "", f"`scontrol update JobId={run.job_id} ExcNodeList=` lets the job start on them."

    for notice in run.notices:
        yield notice.kind, notice.text

    yield from _restarts(run)
    yield from _failure(run)
    if run.log is not None:
        yield "log", str(run.log)

    for command in run.curves:
        yield "curves", command

    if run.report is not None:
        yield "report", str(run.report)

    yield "folder", str(run.path)


def _restarts(run: RunDetails) -> Iterator[tuple[str, str]]:
    """Yield a line for each of the last `_RESTARTS` restarts in place, with the failure that caused it."""
    name = "restarted"
    for restart in run.restarted[-_RESTARTS:]:
        yield name, f"{local_time(restart.time)} {restart.after}".rstrip() + f": {restart.sentence}"
        name = ""

    if len(run.restarted) > _RESTARTS:
        yield name, f"({len(run.restarted) - _RESTARTS} earlier ones)"


def _failure(run: RunDetails) -> Iterator[tuple[str, str]]:
    """Yield the failure of a run and the lines of the log that explain it.

    If no failure of a rank is recorded, yield the last lines of the log, if `run` has any.
    """
    lines = run.last_lines[-_FAILURE_LINES:]
    if run.failure is not None:
        yield "failure", run.failure.sentence
        if run.failure.advice:
            yield "", run.failure.advice
        lines = run.failure.telling_lines(_FAILURE_LINES)

    for line in lines:
        yield "", f"| {line}"


def _progress(run: RunDetails) -> Iterator[tuple[str, str]]:
    """Yield lines about step, losses, metrics, speed and checkpoints of a run."""
    if run.step is not None:
        text = str(run.step)
        if run.total_steps:
            text += f" of {run.total_steps} ({100 * run.step // run.total_steps} %)"
        if run.seen is not None and run.active:
            text += f", last heartbeat {duration(run.time - run.seen)} ago"
        yield "step", text

    if run.loss is not None:
        text = number(run.loss)
        if run.held_out is not None:
            text += f", held-out {number(run.held_out)}"
        yield "loss", text
    if run.metrics:
        yield "metrics", ", ".join(f"{name} {number(value)}" for name, value in run.metrics.items())

    if run.rate is not None:
        # A run that hangs or is suspended records no new speed, so its last speed is marked as outdated.
        text = f"{run.rate:,.0f} {run.rate_unit}{_use(run)}"
        if run.state == "running" and run.seen is not None and run.time - run.seen > _SILENT_S:
            text += " until the last heartbeat"
        yield "speed", text

    if run.saved_step is not None:
        yield "last save", f"step {run.saved_step}, {_ago(run, run.saved)}"
    if run.best is not None:
        yield "best", f"step {run.best.step}, {run.best.name} {number(run.best.value)}"


def _use(run: RunDetails) -> str:
    """Return TFLOP/s per rank and MFU as text; empty if the run does not record them."""
    text = ""
    if run.tflops is not None:
        text += f", {run.tflops:.3g} TFLOP/s per rank"
    if run.mfu is not None:
        text += f", MFU {percent(run.mfu)}"

    return text


def _place(run: RunDetails) -> Iterator[tuple[str, str]]:
    """Yield lines about job, nodes, attempts, start and end of a run."""
    if run.job_id is not None:
        place = f" on {run.nodes}" if run.nodes else ""
        yield "job", (run.allocation or run.job_id) + place
    if run.attempts:
        yield "attempts", str(run.attempts)
    if run.before:
        yield "before", run.before
    if run.started is not None:
        yield "started", _ago(run, run.started)
    if run.ended is not None:
        outcome = (run.outcome or "no recorded outcome").replace("_", " ")
        yield "ended", f"{_ago(run, run.ended)}, exit code {run.exit_code} ({outcome})"


def _goodput(goodput: Goodput) -> str:
    """Return as text the fraction of a run's time spent on training, and the other uses, longest first."""
    sizes = sorted(goodput.parts.items(), key=lambda part: -part[1])
    names: dict[str, str] = {}
    if goodput.share is None:
        names["unknown"] = "in the program"
    parts = ", ".join(
        f"{duration(seconds)} {names.get(kind, kind)}" for kind, seconds in sizes if round(seconds)
    )
    if goodput.share is None:
        return f"{parts or '0s'}; the program reports no first step, so its training time is unknown"

    text = percent(goodput.share)
    if goodput.share_on_nodes is not None and percent(goodput.share_on_nodes) != text:
        text += f" ({percent(goodput.share_on_nodes)} of the time on nodes)"

    return f"{text}: {parts}" if parts else text


def _print_attempts(run: RunDetails) -> None:
    """Print the nodes and the end of each attempt."""
    if run.history:
        rows = [
            (str(each.number), local_time(each.started), each.nodes or "-", each.ended or "not ended yet")
            for each in run.history
        ]
        print("\nAttempts")
        headers = ("ATTEMPT", "STARTED", "NODES", "ENDED BY")
        print_table(headers, rows, sys.stdout, right=frozenset({"ATTEMPT"}), whole=True)


def _print_times(run: RunDetails) -> None:
    """Print the uses of each attempt's time, and the duration of each phase of the last start."""
    goodput = run.goodput
    kinds = list(goodput.parts)
    if kinds:
        entries = [
            ("later" if each.attempt is None else str(each.attempt), each.parts, each.whole)
            for each in goodput.attempts
        ]
        if len(entries) > 1:
            entries.append(("all", goodput.parts, goodput.whole))

        rows = [
            (title, _short(whole), *(_short(parts.get(kind, 0.0)) for kind in kinds))
            for title, parts, whole in entries
        ]
        print("\nWhere the time went")
        headers = ("ATTEMPT", "WHOLE", *(kind.upper() for kind in kinds))
        print_table(headers, rows, sys.stdout, right=frozenset(headers[1:]), whole=True)

    if run.phases is not None:
        print(f"\nStart of attempt {run.phases.attempt}: {run.phases.whole:.2f} s until its first step")
        phases = [(name.replace("_", " "), f"{seconds:.2f}") for name, seconds in run.phases.seconds.items()]
        print_table(("PHASE", "SECONDS"), phases, sys.stdout, right=frozenset({"SECONDS"}), whole=True)


def _print_memory(run: RunDetails) -> None:
    """Print the peak memory of each rank of the newest attempt."""
    peak = run.memory
    if peak is not None:
        print(f"\nPeak memory ({peak.place}); largest: {peak.largest} on rank {peak.largest_rank}")
        rows = [(str(rank), gib(count)) for rank, count in enumerate(peak.ranks)]
        print_table(("RANK", "PEAK"), rows, sys.stdout, right=frozenset({"RANK", "PEAK"}), whole=True)


def _short(seconds: float) -> str:
    """Return a duration for a table: with tenths of a second below 10 s, empty below 0.05 s."""
    if seconds >= 9.95:
        return duration(seconds)
    if seconds >= 0.05:
        return f"{seconds:.1f}s"
    return ""


def _ago(run: RunDetails, moment: float | None) -> str:
    """Return a time, and how long ago it was; `-` for None."""
    return "-" if moment is None else f"{local_time(moment)} ({duration(run.time - moment)} ago)"
