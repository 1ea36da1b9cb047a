"""Show the state of a run, where it runs, and what to do if it does not."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

from slurmddp.cli.commands.list import show as show_table
from slurmddp.control.contract import json_value
from slurmddp.errors import SlurmddpError
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.excluded_nodes import excluded_nodes
from slurmddp.runs.folder.history import how_ended, read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.goodput import AttemptTime, Goodput, read_goodput
from slurmddp.runs.report.start_phases import Phases, newest_phases
from slurmddp.runs.status import logs
from slurmddp.runs.status.best_step import BestStep, best_step
from slurmddp.runs.status.curves import curve_commands
from slurmddp.runs.status.notices import notices
from slurmddp.runs.status.peak_memory import gib, newest_peak_memory
from slurmddp.runs.status.run_status import RunStatus, status
from slurmddp.runs.text_format import (
    STATE_STYLES,
    clock,
    duration,
    number,
    paint,
    percent,
    print_table,
    without_control,
)
from slurmddp.slurm.client import SlurmClient

_SILENT_S = 60.0
"""Seconds without an event and without a logged step after which a speed is one of the past."""
_FAILURE_LINES = 12
_RESTARTS = 5
_WAITING = "slurmddp agent: waiting for "


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
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the state of one run, or the table of a sweep."""
    if (sweep := sweeps.find_to_show(args.run)) is not None:
        return show_table(sweep.started, as_json=args.json)
    folder = index.find(args.run)
    from slurmddp.runs.report.html import with_report

    found, now = with_report(folder, status(folder, SlurmClient())), time.time()
    goodput, phases = _times(folder, found, now)
    if args.json:
        times = {"goodput": goodput.as_json(), "phases": asdict(phases) if phases else None}
        best = _best(folder)
        times["best"] = asdict(best) if best else None
        print(json.dumps({**json_value(found), **times}, indent=2, allow_nan=False))
        return 0
    print(paint(without_control(found.name), "bold", sys.stdout))
    for name, fact in lines(found, goodput, now):
        text = without_control(fact)
        if name == "state":
            state, colon, detail = text.partition(":")
            text = paint(state, STATE_STYLES[found.state], sys.stdout) + colon + detail
        print(f"  {paint(f'{name:<10}', 'grey', sys.stdout)} {text}")
    if args.verbose:
        _print_attempts(folder)
        _print_times(goodput, phases)
        _print_memory(folder)
    return 0


def _times(folder: RunFolder, found: RunStatus, now: float) -> tuple[Goodput, Phases | None]:
    """Return the use of the time, empty if the record can't be read; the state then tells why."""
    try:
        return read_goodput(folder, found, now), newest_phases(folder.events())
    except (SlurmddpError, OSError):
        return Goodput(), None


def lines(one: RunStatus, goodput: Goodput, now: float) -> Iterator[tuple[str, str]]:
    """Yield the facts of a run as (name, text), the most important first."""
    yield "state", f"{one.state}: {one.detail}"
    if one.advice:
        yield "next", one.advice
    yield from _awaited(one)
    yield from _progress(one, now)
    if goodput.whole:
        yield "time" if goodput.share is None else "goodput", _goodput(goodput)
        yield "used", f"{goodput.hours:,.2f} {goodput.unit}"
    yield from _place(one, now)
    if failed := excluded_nodes(RunFolder(one.path), now):
        yield "avoids", f"{', '.join(failed)}: failed recently"
        if one.active and one.state in ("queued", "stopped") and one.job_id:
            # SLURM keeps the exclusion while the job waits, even if too many other nodes fail meanwhile.
            yield "", f"`scontrol update JobId={one.job_id} ExcNodeList=` lets the job start there."
    yield from _notices(RunFolder(one.path))
    yield from _restarted(one)
    if one.failure is not None:
        yield "failure", one.failure.sentence
        if one.failure.advice:
            yield "", one.failure.advice
        for line in one.failure.telling_lines(_FAILURE_LINES):
            yield "", f"| {line}"
    elif one.state in ("failed", "lost"):
        for line in _last_words(RunFolder(one.path)):
            yield "", f"| {line}"
    if one.log is not None:
        yield "log", str(one.log)
    for command in curve_commands(RunFolder(one.path)):
        yield "curves", command
    if one.report is not None:
        yield "report", str(one.report)
    yield "folder", str(one.path)


def _awaited(one: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield the nodes that have not joined, which node 0's agent names before the ranks start."""
    if one.state not in ("starting", "running") or one.log is None or one.log.name != "node-0.log":
        return
    for line in logs.tail(one.log, 1):
        if line.startswith(_WAITING):
            yield "waiting", line.removeprefix(_WAITING)


def _restarted(one: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield the last failures after which the ranks restarted in place."""
    name = "restarted"
    for restart in one.restarted[-_RESTARTS:]:
        yield name, f"{clock(restart.time)} {restart.after}".rstrip() + f": {restart.sentence}"
        name = ""
    if len(one.restarted) > _RESTARTS:
        yield name, f"({len(one.restarted) - _RESTARTS} more before)"


def _last_words(folder: RunFolder) -> list[str]:
    """Return the last lines of the agents and the batch script, for an end without a failing rank."""
    attempts = folder.attempts()
    paths = logs.chosen(folder, attempts[-1], logs.Selection(frozenset())) if attempts else []
    lines = [
        f"[{logs.label(path)}] {line}" for path in paths for line in logs.tail(path, _FAILURE_LINES // 2)
    ]
    return lines[-_FAILURE_LINES:]


def _notices(folder: RunFolder) -> list[tuple[str, str]]:
    with suppress(SlurmddpError, OSError):  # The state tells of an unreadable record.
        return list(notices(folder.events()))
    return []


def _progress(one: RunStatus, now: float) -> Iterator[tuple[str, str]]:
    if one.step is not None:
        total = one.total_steps
        share = f" of {total} ({100 * one.step // total} %)" if total else ""
        seen = (
            "" if one.seen is None or not one.active else f", last heartbeat {duration(now - one.seen)} ago"
        )
        yield "step", f"{one.step}{share}{seen}"
    if one.loss is not None:
        held_out = "" if one.held_out is None else f", held-out {number(one.held_out)}"
        yield "loss", f"{number(one.loss)}{held_out}"
    if one.metrics:
        yield "metrics", ", ".join(f"{name} {number(value)}" for name, value in one.metrics.items())
    if one.rate is not None:
        # A file server that stands still, or a suspended job, leaves the last value.
        is_old = one.state == "running" and one.seen is not None and now - one.seen > _SILENT_S
        until = " until the last heartbeat" if is_old else ""
        yield "speed", f"{one.rate:,.0f} {one.rate_unit}{_use(one)}{until}"
    if one.saved_step is not None:
        yield "last save", f"step {one.saved_step}, {_ago(one.saved, now)}"
    if best := _best(RunFolder(one.path)):
        yield "best", f"step {best.step}, {best.name} {number(best.value)}"


def _best(folder: RunFolder) -> BestStep | None:
    with suppress(SlurmddpError, OSError):  # The state tells of an unreadable record.
        return best_step(folder)
    return None


def _use(one: RunStatus) -> str:
    """Return how well the devices are used, if the training counts its operations."""
    text = "" if one.tflops is None else f", {one.tflops:.3g} TFLOP/s per rank"
    return text if one.mfu is None else f"{text}, MFU {percent(one.mfu)}"


def _place(one: RunStatus, now: float) -> Iterator[tuple[str, str]]:
    if one.job_id is not None:
        yield "job", (one.allocation or one.job_id) + (f" on {one.nodes}" if one.nodes else "")
    if one.attempts:
        yield "attempts", str(one.attempts)
    if one.before:
        yield "before", one.before
    if one.started is not None:
        yield "started", _ago(one.started, now)
    if one.ended is not None:
        outcome = (one.outcome or "no outcome given").replace("_", " ")
        yield "ended", f"{_ago(one.ended, now)}, exit code {one.exit_code} ({outcome})"


def _goodput(goodput: Goodput) -> str:
    """Return the share of time spent on training, and the other uses, the largest first."""
    share, held = goodput.share, goodput.share_on_nodes
    sizes = sorted(goodput.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{duration(seconds)} {word}" for word, seconds in sizes if round(seconds))
    if share is None:
        words = parts.replace("unknown", "in the program")
        return f"{words or '0s'}; the program reports no first step, so its share of training is not known"
    text = percent(share)
    if held is not None and percent(held) != percent(share):
        text += f" ({percent(held)} of the time on nodes)"
    return f"{text}: {parts}" if parts else text


def _print_attempts(folder: RunFolder) -> None:
    """Print the nodes and the end of each attempt."""
    with suppress(SlurmddpError, OSError):
        attempts = read_history(folder).attempts
        rows = [
            (
                str(one.number),
                clock(one.started),
                one.nodes or "-",
                "not ended yet" if one.is_open and one is attempts[-1] else how_ended(one),
            )
            for one in attempts
        ]
        if rows:
            print("\nAttempts")
            headers = ("ATTEMPT", "STARTED", "NODES", "ENDED BY")
            print_table(headers, rows, sys.stdout, right=frozenset({"ATTEMPT"}), whole=True)


def _print_times(goodput: Goodput, phases: Phases | None) -> None:
    """Print the use of time of each attempt, and the phases of the newest start."""
    kinds = list(goodput.parts)
    if kinds:
        print("\nWhere the time went")
        entries = [(_title(one), one.parts, one.whole) for one in goodput.attempts]
        entries += [("all", goodput.parts, goodput.whole)] if len(entries) > 1 else []
        rows = [
            (title, _short(whole), *(_short(parts.get(kind, 0.0)) for kind in kinds))
            for title, parts, whole in entries
        ]
        headers = ("ATTEMPT", "WHOLE", *(kind.upper() for kind in kinds))
        print_table(headers, rows, sys.stdout, right=frozenset(headers[1:]), whole=True)
    if phases is not None:
        print(f"\nStart of attempt {phases.attempt}, {phases.whole:.2f} s to its first step")
        rows = [(name.replace("_", " "), f"{seconds:.2f}") for name, seconds in phases.seconds.items()]
        print_table(("PHASE", "SECONDS"), rows, sys.stdout, right=frozenset({"SECONDS"}), whole=True)


def _print_memory(folder: RunFolder) -> None:
    """Print the peak memory of each rank of the newest attempt."""
    with suppress(SlurmddpError, OSError):
        peak = newest_peak_memory(folder.events())
        if peak is not None:
            print(f"\nPeak memory ({peak.place}), at most {peak.largest} on rank {peak.largest_rank}")
            rows = [(str(rank), gib(count)) for rank, count in enumerate(peak.ranks)]
            print_table(("RANK", "PEAK"), rows, sys.stdout, right=frozenset({"RANK", "PEAK"}), whole=True)


def _short(seconds: float) -> str:
    """Return a duration for a table: tenths if it is short, and a blank for 0."""
    if seconds >= 9.95:
        return duration(seconds)
    return f"{seconds:.1f}s" if seconds >= 0.05 else ""


def _title(one: AttemptTime) -> str:
    return "later" if one.attempt is None else str(one.attempt)


def _ago(moment: float | None, now: float) -> str:
    return "-" if moment is None else f"{clock(moment)} ({duration(now - moment)} ago)"
