"""Write the report of a run: an HTML page that needs no network and no other file."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from slurmddp.host.regular_file import read_regular
from slurmddp.pages import drawing
from slurmddp.pages.page import write_page
from slurmddp.pages.table import Cell, Column, Table, table
from slurmddp.runs.failures.failure import Failure
from slurmddp.runs.failures.read import read_failure, read_restarts
from slurmddp.runs.folder import config_secrets
from slurmddp.runs.folder.history import History, RecordedAttempt, read_history, why_stopped
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.report import curves
from slurmddp.runs.report.goodput import Goodput, read_goodput
from slurmddp.runs.report.time_bars import Bar, time_bars
from slurmddp.runs.status import merged_logs
from slurmddp.runs.status.best_step import BestStep, best_step
from slurmddp.runs.status.metrics import Curve, LoggedStep, Metrics, read
from slurmddp.runs.status.peak_memory import PeakMemory, gib, newest_peak_memory
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.runs.text_format import counted, duration, local_time, number, percent
from slurmddp.settings.arguments import as_typed
from slurmddp.settings.identity import relevant
from slurmddp.settings.spec import CONTROLLER

_SAMPLE_CHARS = 4000
_OUTPUT_LINES = 20
_WARNINGS = 20
TONES = {
    "finished": "good",
    "failed": "bad",
    "lost": "bad",
    "unknown": "wait",
    "cancelled": "wait",
    "stopped": "wait",
    "starting": "busy",
    "running": "busy",
    "queued": "busy",
    "preparing": "busy",
}


@dataclass(frozen=True)
class Tile:
    """A key figure at the top of the report: a label, a value as text, and a short note."""

    label: str
    value: str
    note: str = ""


def with_report(folder: RunFolder, status: RunStatus) -> RunStatus:
    """Write the report of an ended run if it is missing or out of date; return the status with its path.

    An ended run is finished or failed. For other runs, without matplotlib, and in a folder of another
    account, the status is returned unchanged.
    """
    if status.state in ("finished", "failed"):
        # All errors are ignored: without a report, the status can still be shown.
        with suppress(Exception):
            refuse_foreign(folder.path, READ_ONLY)
            if _is_due(folder):
                return replace(status, report=write_report(folder, status))
            # Another process may have written the report after the status was read.
            return replace(status, report=folder.report_file)
    return status


def _is_due(folder: RunFolder) -> bool:
    """Return whether the events or metrics of a run are newer than its report, or the report is missing."""
    times = [
        path.stat().st_mtime_ns if path.exists() else 0
        for path in (folder.report_file, folder.attempts_file, folder.metrics_file)
    ]
    return times[0] < max(times)


def write_report(folder: RunFolder, run: RunStatus) -> Path:
    """Write `report.html` and `report.png` from the run folder, and return the path of the page.

    Args:
        folder: the run folder.
        run: the status of the run.

    Raises:
        SlurmddpError: matplotlib is missing.
    """
    history = read_history(folder)
    metrics = read(folder)
    config = folder.config()
    starts = {attempt.number: attempt.start_step for attempt in history.attempts if attempt.start_step}
    has_script = bool((config.get("program") or {}).get("script"))

    goodput = read_goodput(folder, run, time.time())
    events = list(folder.events())
    memory = newest_peak_memory(events)
    tiles = _tiles(config, run, goodput, metrics, best_step(folder), memory, known_only=has_script)

    loss: dict[str, str] = {}
    if curves.has_points(metrics.train, metrics.held_out):
        draw = partial(curves.draw_loss, metrics.train, metrics.held_out, starts)
        drawing.write_png(folder.figure_file, partial(draw, (9.0, 4.6), folder.name))
        loss = drawing.picture("loss", draw)

    optimizer: dict[str, str] = {}
    if curves.has_points(metrics.lr, metrics.grad_norm):
        draw = partial(curves.draw_optimizer, metrics, starts)
        optimizer = drawing.picture("optimizer", draw, wide=(9.2, 2.6), narrow=(4.6, 4.8))

    output = ""
    # Before rank 0 has written a line, `run.log` is the folder of the logs.
    if has_script and run.log and run.log.is_file():
        output = "\n".join(merged_logs.tail(run.log, _OUTPUT_LINES))
    return write_page(
        folder.report_file,
        "report.html.j2",
        kind="Training run",
        name=folder.name,
        run=run,
        tone=TONES[run.state],
        tiles=tiles,
        tiles_per_row=partial(_per_row, len(tiles)),
        attempts=_attempts(folder, history, metrics, run),
        restarts=[(restart.attempt, restart) for restart in read_restarts(folder, history.attempts)],
        bars=_bars(goodput),
        loss=loss,
        loss_label=_loss_label(metrics),
        has_steps=bool(loss) or not has_script,
        starts=starts,
        optimizer=optimizer,
        warnings=_warnings(events),
        memory=memory,
        sample=_text(folder.sample_file)[:_SAMPLE_CHARS],
        output=output,
        code=_text(folder.code_note_file).strip(),
        command=_command(folder, config),
        config=_config(folder),
        local_time=local_time,
        gib=gib,
    )


def _bars(goodput: Goodput) -> list[Bar]:
    """Return the bars that show how the time was spent; none if all of it is of unknown kind."""
    if set(goodput.parts) == {"unknown"}:
        return []
    return time_bars(goodput)


def _per_row(count: int, limit: int) -> int:
    """Return the number of tiles per row, at most `limit`, with which the rows are filled most evenly."""
    rows = max(1, math.ceil(count / limit))
    return math.ceil(count / rows)


def _tiles(
    config: dict[str, Any],
    status: RunStatus,
    goodput: Goodput,
    metrics: Metrics,
    best: BestStep | None,
    memory: PeakMemory | None,
    *,
    known_only: bool,
) -> list[Tile]:
    """Return the key figures of a run in the order of the page.

    With `known_only`, figures without a value are left out; runs of scripts have several of them.
    """
    tiles = [_steps_tile(status), *_loss_tiles(metrics)]
    if best:
        tiles.append(Tile(f"Best {best.name}", number(best.value), f"step {best.step}"))
    tiles += [_speed_tile(metrics), *_use_tiles(status, memory), _time_tile(goodput)]

    nodes = config.get("nodes")
    ranks = config.get("ranks_per_node")
    if isinstance(nodes, int) and isinstance(ranks, int):
        note = f"on {counted(nodes, 'node')}"
        if goodput.hours:
            note += f", {goodput.hours:,.2f} {goodput.unit}"
        tiles.append(Tile("Ranks", str(nodes * ranks), note))
    return [tile for tile in tiles if not known_only or tile.value != "-"]


def _steps_tile(status: RunStatus) -> Tile:
    total = f"of {status.total_steps}" if status.total_steps else ""
    if status.step is None:
        return Tile("Steps", "-", total)
    return Tile("Steps", f"{status.step:,}", total)


def _loss_tiles(metrics: Metrics) -> list[Tile]:
    """Return tiles with the last values of the training loss, the held-out loss and each other metric."""
    held_out = metrics.held_out
    held_out_note = ""
    if len(held_out) > 1:
        held_out_note = f"from {number(held_out.values[0])}"

    return [
        Tile("Training loss", number(_last(metrics.train)), "last logged"),
        Tile("Held-out loss", number(_last(held_out)), held_out_note),
        *(Tile(name, number(curve.values[-1]), "last logged") for name, curve in metrics.own.items()),
    ]


def _last(curve: Curve) -> float | None:
    return curve.values[-1] if len(curve) else None


def _speed_tile(metrics: Metrics) -> Tile:
    if metrics.rate is None:
        return Tile("Speed", "-", "no step was logged")
    return Tile("Speed", f"{metrics.rate:,.0f}", f"{metrics.rate_unit}, median")


def _use_tiles(status: RunStatus, memory: PeakMemory | None) -> list[Tile]:
    """Return tiles with TFLOP/s and peak memory, each only if it was recorded."""
    tiles = []
    if status.tflops is not None:
        note = "per rank, last logged"
        if status.mfu is not None:
            note = f"per rank, MFU {percent(status.mfu)}"
        tiles.append(Tile("TFLOP/s", f"{status.tflops:.3g}", note))
    if memory is not None:
        tiles.append(Tile("Peak memory", memory.largest, f"{memory.place}, rank {memory.largest_rank}"))
    return tiles


def _warnings(events: Iterable[Mapping[str, Any]]) -> list[str]:
    texts = dict.fromkeys(str(event.get("text", "")) for event in events if event.get("event") == "warned")
    return list(texts)[-_WARNINGS:]


def _time_tile(goodput: Goodput) -> Tile:
    if not goodput.whole:
        return Tile("Goodput", "-")
    if goodput.share is None:
        return Tile("Time", duration(goodput.whole), "share of training unknown")
    return Tile("Goodput", percent(goodput.share), f"of {duration(goodput.whole)}")


def _lasted(attempt: RecordedAttempt, logged: LoggedStep | None) -> float | None:
    """Return how many seconds an attempt lasted; None if its start was not recorded.

    Without a recorded end, it lasted until its last event or logged step.
    """
    if attempt.started is None:
        return None

    end = attempt.ended
    if end is None:
        end = attempt.seen
        if logged is not None:
            end = max(end or 0.0, logged.time)
    if end is None:
        return None
    return max(0.0, end - attempt.started)


def _attempts(folder: RunFolder, history: History, metrics: Metrics, run: RunStatus) -> Table:
    attempts = history.attempts
    logged = [metrics.logged.get(attempt.number) for attempt in attempts]
    lasted = list(map(_lasted, attempts, logged))
    outcomes = [Cell(*_outcome(attempt, folder, history, run)) for attempt in attempts]

    return table(
        Column("Attempt", [attempt.number for attempt in attempts]),
        Column("Job", [attempt.job_id for attempt in attempts]),
        Column("Nodes", [attempt.nodes for attempt in attempts]),
        Column("Started", [attempt.started for attempt in attempts], local_time),
        Column("Lasted", lasted, duration),
        Column("Steps", list(map(_steps, attempts, logged))),
        Column("Outcome", outcomes, kind="prose"),
    )


def _steps(attempt: RecordedAttempt, logged: LoggedStep | None) -> str:
    """Return the first and the last step of an attempt, such as `100 to 250`; `none` if no step is known."""
    steps = []
    if logged is not None:
        steps.append(logged.step)
    if attempt.saved_step is not None:
        steps.append(attempt.saved_step)
    if not steps:
        return "none"

    first = "?" if attempt.start_step is None else attempt.start_step
    return f"{first} to {max(steps)}"


def _outcome(
    attempt: RecordedAttempt, folder: RunFolder, history: History, status: RunStatus
) -> tuple[str, str]:
    """Return a text about the end of an attempt, and the name of its colour (see `TONES`)."""
    is_newest = attempt is history.newest
    failure = read_failure(folder, attempt.number)
    if attempt.outcome == "finished":
        return "finished", "good"
    if attempt.outcome == "stopped":
        return _stopped(attempt, failure), "wait"

    # The newest failure is shown without its reason, which the page shows above the table.
    if failure is not None and is_newest:
        return failure.short, "bad"
    if failure is not None:
        return failure.sentence, "bad"

    if attempt.is_open and is_newest:
        return status.state, TONES[status.state]
    if attempt.is_open:
        return "no end recorded", "wait"
    text = (attempt.outcome or "ended").replace("_", " ")
    if attempt.exit_code is not None:
        text += f", exit code {attempt.exit_code}"
    return text, "bad"


def _stopped(attempt: RecordedAttempt, failure: Failure | None) -> str:
    """Return a text about an attempt that was stopped, such as "stopped at a checkpoint (time limit)".

    If a script failed after it was asked to stop, its failure follows.
    """
    stopped = "stopped"
    if attempt.saved_step is not None or attempt.resumed_step is not None:
        stopped += " at a checkpoint"
    reason = why_stopped(attempt)
    if reason:
        stopped += f" ({reason})"

    if failure is not None and failure.asked_to_stop:
        return f"{stopped}; {failure.short}"
    return stopped


def _loss_label(metrics: Metrics) -> str:
    """Return a text for screen readers with the first and last values of the loss curves."""
    curves_by_name = {"training loss": metrics.train, "held-out loss": metrics.held_out}
    parts = [
        f"{name} from {number(curve.values[0])} to {number(curve.values[-1])}"
        for name, curve in curves_by_name.items()
        if len(curve)
    ]
    return "Loss over steps: " + ", ".join(parts)


def _command(folder: RunFolder, config: Mapping[str, Any]) -> str:
    """Return the command that started a run, as a person typed it, without values of `cluster.env`."""
    script = (config.get("program") or {}).get("script")
    if script == CONTROLLER:
        command = "controller"
    else:
        command = "run" if script else "train"

    typed = _text(folder.overrides_file)
    # The file has one quoted argument per line. shlex is used, because an argument may contain a line break.
    try:
        arguments = shlex.split(typed)
    except ValueError:
        arguments = typed.split()
    shown = [config_secrets.argument_for_readers(argument) for argument in arguments]
    return shlex.join(["slurmddp", command, *as_typed(shown)])


def _config(folder: RunFolder) -> str:
    shown = config_secrets.for_readers(relevant(folder.config()))
    return str(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))


def _text(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8", errors="replace")
    except OSError:
        return ""
