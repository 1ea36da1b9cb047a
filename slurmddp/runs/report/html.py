"""Write the report of a run: one HTML page that needs no network and no other file."""

from __future__ import annotations

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
from slurmddp.runs.report.time_bars import time_bars
from slurmddp.runs.status import logs
from slurmddp.runs.status.best_step import BestStep, best_step
from slurmddp.runs.status.metrics import LoggedStep, Metrics, read
from slurmddp.runs.status.peak_memory import PeakMemory, gib, newest_peak_memory
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.runs.text_format import duration, local_time, number, percent
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
    """One key figure of the report."""

    label: str
    value: str
    note: str = ""


def with_report(folder: RunFolder, found: RunStatus) -> RunStatus:
    """Return the status of a run with its report; write the report if the run has ended since.

    Without matplotlib, and in a folder of another account, the report is left out.
    """
    if found.state in ("finished", "failed"):
        with suppress(Exception):  # An error of the report must not hide the status.
            refuse_foreign(folder.path, READ_ONLY)
            if _is_due(folder):
                return replace(found, report=write_report(folder, found))
    return found


def _is_due(folder: RunFolder) -> bool:
    """Return whether the records of a run are newer than its report."""
    times = [
        path.stat().st_mtime_ns if path.exists() else 0
        for path in (folder.report_file, folder.attempts_file, folder.metrics_file)
    ]
    return times[0] < max(times)


def write_report(folder: RunFolder, run: RunStatus) -> Path:
    """Write `report.html` and `report.png` from the run folder, and return the path of the page.

    Args:
        folder: of the run.
        run: its status.

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
        draw = partial(curves.draw_loss, metrics, starts)
        drawing.write_png(folder.figure_file, partial(draw, (9.0, 4.6), folder.name))
        loss = drawing.picture("loss", draw)
    optimizer: dict[str, str] = {}
    if curves.has_points(metrics.lr, metrics.grad_norm):
        draw = partial(curves.draw_optimizer, metrics, starts)
        optimizer = drawing.picture("optimizer", draw, wide=(9.2, 2.6), narrow=(4.6, 4.8))

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
        bars=[] if set(goodput.parts) == {"unknown"} else time_bars(goodput),
        loss=loss,
        loss_label=_loss_label(metrics),
        has_steps=bool(loss) or not has_script,
        starts=starts,
        optimizer=optimizer,
        warnings=_warnings(events),
        memory=memory,
        sample=_text(folder.sample_file)[:_SAMPLE_CHARS],
        output="\n".join(logs.tail(run.log, _OUTPUT_LINES)) if has_script and run.log else "",
        code=_text(folder.code_note_file).strip(),
        command=_command(folder, config),
        config=_config(folder),
        local_time=local_time,
        gib=gib,
    )


def _per_row(count: int, most: int) -> int:
    """Return the tiles per row, `most` or fewer, that fill the rows as evenly as possible."""
    rows = -(-count // most) or 1
    return -(-count // rows)


def _tiles(
    config: dict[str, Any],
    now: RunStatus,
    goodput: Goodput,
    metrics: Metrics,
    best: BestStep | None,
    memory: PeakMemory | None,
    *,
    known_only: bool,
) -> list[Tile]:
    """Return the key figures; `known_only` leaves out those that a program of the user may never have."""
    nodes, ranks = config.get("nodes"), config.get("ranks_per_node")
    held = metrics.held_out
    first = f"from {number(held.values[0])}" if len(held) > 1 else ""
    total = f"of {now.total_steps}" if now.total_steps else ""
    train = metrics.train.values
    speed = "-" if metrics.rate is None else f"{metrics.rate:,.0f}"
    tiles = [
        Tile("Steps", "-" if now.step is None else f"{now.step:,}", total),
        Tile("Training loss", number(train[-1] if train else None), "last logged"),
        Tile("Held-out loss", number(held.values[-1] if len(held) else None), first),
        *(Tile(name, number(curve.values[-1]), "last logged") for name, curve in metrics.own.items()),
        *([Tile(f"Best {best.name}", number(best.value), f"step {best.step}")] if best else []),
        Tile(
            "Speed", speed, "no step was logged" if metrics.rate is None else f"{metrics.rate_unit}, median"
        ),
        *_use_tiles(now, memory),
        _time_tile(goodput),
    ]
    if isinstance(nodes, int) and isinstance(ranks, int):
        used = f", {goodput.hours:,.2f} {goodput.unit}" if goodput.hours else ""
        tiles.append(Tile("Ranks", str(nodes * ranks), f"on {nodes} node{'s' * (nodes != 1)}{used}"))
    return [tile for tile in tiles if not known_only or tile.value != "-"]


def _use_tiles(now: RunStatus, memory: PeakMemory | None) -> list[Tile]:
    """Return the use of the devices, as far as it was recorded."""
    tiles = []
    if now.tflops is not None:
        share = "per rank, last logged" if now.mfu is None else f"per rank, MFU {percent(now.mfu)}"
        tiles.append(Tile("TFLOP/s", f"{now.tflops:.3g}", share))
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
    if attempt.started is None:
        return None
    seen = [moment for moment in (attempt.seen, logged.time if logged else None) if moment is not None]
    end = attempt.ended if attempt.ended is not None else max(seen, default=None)
    return None if end is None else max(0.0, end - attempt.started)


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
    known = (logged.step if logged else None, attempt.saved_step)
    last = max((step for step in known if step is not None), default=None)
    first = "?" if attempt.start_step is None else attempt.start_step
    return "none" if last is None else f"{first} to {last}"


def _outcome(
    attempt: RecordedAttempt, folder: RunFolder, history: History, now: RunStatus
) -> tuple[str, str]:
    """Return how an attempt ended, in words, and the tone of its colour."""
    failure = read_failure(folder, attempt.number)
    if attempt.outcome == "finished":
        return "finished", "good"
    if attempt.outcome == "stopped":
        return _stopped(attempt, failure), "wait"
    if failure is not None:  # The page shows the reason of the newest failure above.
        return failure.short if attempt is history.newest else failure.sentence, "bad"
    if attempt.is_open:
        return (now.state, TONES[now.state]) if attempt is history.newest else ("no end recorded", "wait")
    code = "" if attempt.exit_code is None else f", exit code {attempt.exit_code}"
    return (attempt.outcome or "ended").replace("_", " ") + code, "bad"


def _stopped(attempt: RecordedAttempt, failure: Failure | None) -> str:
    """Return how an attempt was stopped: at a checkpoint if one is known, why, and a script's own error."""
    known = attempt.saved_step is not None or attempt.resumed_step is not None
    reason = why_stopped(attempt)
    stopped = f"stopped{' at a checkpoint' * known}" + (f" ({reason})" if reason else "")
    if failure is not None and failure.asked_to_stop:
        return f"{stopped}; {failure.short}"
    return stopped


def _loss_label(metrics: Metrics) -> str:
    parts = [
        f"{what} from {number(curve.values[0])} to {number(curve.values[-1])}"
        for what, curve in (("training loss", metrics.train), ("held-out loss", metrics.held_out))
        if len(curve)
    ]
    return "Loss over steps: " + ", ".join(parts)


def _command(folder: RunFolder, config: Mapping[str, Any]) -> str:
    script = (config.get("program") or {}).get("script")
    command = "controller" if script == CONTROLLER else "run" if script else "train"
    typed = _text(folder.overrides_file)
    try:
        words = shlex.split(typed)  # Quoted words, one per line; a word may hold a line break.
    except ValueError:
        words = typed.split()
    return shlex.join(["slurmddp", command, *as_typed([*map(config_secrets.argument_for_readers, words)])])


def _config(folder: RunFolder) -> str:
    shown = config_secrets.for_readers(relevant(folder.config()))
    return str(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))


def _text(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8", errors="replace")
    except OSError:
        return ""
