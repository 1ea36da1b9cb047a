"""Show the state of a run, where it runs, and what to do if it does not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from slurmddp.cli.commands.list import print_listing
from slurmddp.cli.json_output import add_json, print_json
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
"""Seconds without an event and without a logged step after which a speed is one of the past."""
_FAILURE_LINES = 12
_RESTARTS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp status`."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="name, its beginning, folder; or a sweep (default: newest run)",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also the end of each attempt, and what its time was used for",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state of one run, or the table of a sweep."""
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
    print(paint(without_control(run.name), "bold", sys.stdout))
    for name, fact in _lines(run):
        text = without_control(fact)
        if name == "state":
            text = f"{paint(run.state, STATE_STYLES[run.state], sys.stdout)}: {text}"
        print(f"  {paint(f'{name:<10}', 'grey', sys.stdout)} {text}")


def _lines(run: RunDetails) -> Iterator[tuple[str, str]]:
    """Yield the facts of a run as (name, text), the most important first."""
    yield "state", run.detail
    if run.advice:
        yield "next", run.advice
    if run.awaited:
        yield "waiting", run.awaited
    yield from _progress(run)
    if run.goodput.whole:
        yield "time" if run.goodput.share is None else "goodput", _goodput(run.goodput)
        yield "used", f"{run.goodput.hours:,.2f} {run.goodput.unit}"
    yield from _place(run)
    if run.avoided_nodes:
        yield "avoids", f"{', '.join(run.avoided_nodes)}: failed recently"
        if run.active and run.state in ("queued", "stopped") and run.job_id:
            # SLURM keeps the exclusion while the job waits, even if too many other nodes fail meanwhile.
            yield "", f"`scontrol update JobId={run.job_id} ExcNodeList=` lets the job start there."
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
    """Yield the last failures after which the ranks restarted in place."""
    name = "restarted"
    for restart in run.restarted[-_RESTARTS:]:
        yield name, f"{local_time(restart.time)} {restart.after}".rstrip() + f": {restart.sentence}"
        name = ""
    if len(run.restarted) > _RESTARTS:
        yield name, f"({len(run.restarted) - _RESTARTS} more before)"


def _failure(run: RunDetails) -> Iterator[tuple[str, str]]:
    """Yield the failure of a run, or the last lines of an end without a failing rank."""
    lines = run.last_lines[-_FAILURE_LINES:]
    if run.failure is not None:
        yield "failure", run.failure.sentence
        if run.failure.advice:
            yield "", run.failure.advice
        lines = run.failure.telling_lines(_FAILURE_LINES)
    for line in lines:
        yield "", f"| {line}"


def _progress(run: RunDetails) -> Iterator[tuple[str, str]]:
    if run.step is not None:
        share = f" of {run.total_steps} ({100 * run.step // run.total_steps} %)" if run.total_steps else ""
        is_seen = run.seen is not None and run.active
        seen = f", last heartbeat {duration(run.time - (run.seen or 0.0))} ago" if is_seen else ""
        yield "step", f"{run.step}{share}{seen}"
    if run.loss is not None:
        held_out = "" if run.held_out is None else f", held-out {number(run.held_out)}"
        yield "loss", f"{number(run.loss)}{held_out}"
    if run.metrics:
        yield "metrics", ", ".join(f"{name} {number(value)}" for name, value in run.metrics.items())
    if run.rate is not None:
        # A file server that stands still, or a suspended job, leaves the last value.
        is_old = run.state == "running" and run.seen is not None and run.time - run.seen > _SILENT_S
        until = " until the last heartbeat" if is_old else ""
        yield "speed", f"{run.rate:,.0f} {run.rate_unit}{_use(run)}{until}"
    if run.saved_step is not None:
        yield "last save", f"step {run.saved_step}, {_ago(run, run.saved)}"
    if run.best is not None:
        yield "best", f"step {run.best.step}, {run.best.name} {number(run.best.value)}"


def _use(run: RunDetails) -> str:
    """Return how well the devices are used, if the training counts its operations."""
    text = "" if run.tflops is None else f", {run.tflops:.3g} TFLOP/s per rank"
    return text if run.mfu is None else f"{text}, MFU {percent(run.mfu)}"


def _place(run: RunDetails) -> Iterator[tuple[str, str]]:
    if run.job_id is not None:
        yield "job", (run.allocation or run.job_id) + (f" on {run.nodes}" if run.nodes else "")
    if run.attempts:
        yield "attempts", str(run.attempts)
    if run.before:
        yield "before", run.before
    if run.started is not None:
        yield "started", _ago(run, run.started)
    if run.ended is not None:
        outcome = (run.outcome or "no outcome given").replace("_", " ")
        yield "ended", f"{_ago(run, run.ended)}, exit code {run.exit_code} ({outcome})"


def _goodput(goodput: Goodput) -> str:
    """Return the share of time spent on training, and the other uses, the largest first."""
    sizes = sorted(goodput.parts.items(), key=lambda part: -part[1])
    names = {} if goodput.share is not None else {"unknown": "in the program"}
    parts = ", ".join(
        f"{duration(seconds)} {names.get(kind, kind)}" for kind, seconds in sizes if round(seconds)
    )
    if goodput.share is None:
        return f"{parts or '0s'}; the program reports no first step, so its share of training is not known"

    text = percent(goodput.share)
    on_nodes = percent(goodput.share if goodput.share_on_nodes is None else goodput.share_on_nodes)
    if on_nodes != text:
        text += f" ({on_nodes} of the time on nodes)"
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
    """Print the use of time of each attempt, and the phases of the newest start."""
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
        print(f"\nStart of attempt {run.phases.attempt}, {run.phases.whole:.2f} s to its first step")
        phases = [(name.replace("_", " "), f"{seconds:.2f}") for name, seconds in run.phases.seconds.items()]
        print_table(("PHASE", "SECONDS"), phases, sys.stdout, right=frozenset({"SECONDS"}), whole=True)


def _print_memory(run: RunDetails) -> None:
    """Print the peak memory of each rank of the newest attempt."""
    peak = run.memory
    if peak is not None:
        print(f"\nPeak memory ({peak.place}), at most {peak.largest} on rank {peak.largest_rank}")
        rows = [(str(rank), gib(count)) for rank, count in enumerate(peak.ranks)]
        print_table(("RANK", "PEAK"), rows, sys.stdout, right=frozenset({"RANK", "PEAK"}), whole=True)


def _short(seconds: float) -> str:
    """Return a duration for a table: tenths if it is short, and a blank for 0."""
    if seconds >= 9.95:
        return duration(seconds)
    return f"{seconds:.1f}s" if seconds >= 0.05 else ""


def _ago(run: RunDetails, moment: float | None) -> str:
    return "-" if moment is None else f"{local_time(moment)} ({duration(run.time - moment)} ago)"
