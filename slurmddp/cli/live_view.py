"""Show a running training: a progress bar on a terminal, plain lines elsewhere.

The view reads only the run folder (`metrics.jsonl`, `attempts.jsonl`), and so serves local and remote runs.
It starts no thread: the caller calls `tick` a few times per second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from slurmddp.runs.failures.failure import from_facts
from slurmddp.runs.folder.history import restart_count, stop_reason, stop_source
from slurmddp.runs.folder.late_files import is_there
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.logs import LineReader
from slurmddp.runs.status.metrics import own_names, rate_of
from slurmddp.runs.status.notices import other_places
from slurmddp.runs.text_format import counted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_EVERY_S = 5.0
"""Seconds between two plain lines."""
_RATE_WINDOW = 12
_RUNS = "running, no step reported"
"""The note for a program that may never report a step, from its start on."""


def new_records(reader: LineReader) -> list[dict[str, Any]]:
    """Return the JSON records that a file gained since the last call."""
    return [record for line in reader.read() if (record := _parsed(line)) is not None]


def _new_lines(path: Path) -> LineReader:
    """Return a reader of the lines that a file gains from now on."""
    return LineReader(path, path.stat().st_size if is_there(path) else 0)


def _written_at(record: dict[str, Any]) -> float:
    written = record.get("time", 0.0)
    return float(written) if isinstance(written, (int, float)) else 0.0


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Reading:
    """The newest facts of a run, updated record by record.

    Args:
        total_steps: the number of optimizer steps of the run; None if only its program knows it.
        is_foreign: whether the program may report no steps, so that nothing tells when its preparations end.
    """

    def __init__(self, total_steps: int | None, *, is_foreign: bool = False) -> None:
        self.total_steps = total_steps
        self._is_foreign = is_foreign
        self.step = 0
        self.loss: float | None = None
        self.held_out: float | None = None
        self.rate: float | None = None
        self.rate_unit = "tokens/s"
        self.note = ""
        """The current activity between steps: waiting, importing, saving."""
        self._points: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        self._is_local = False

    def add_metric(self, record: dict[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        if step < self.step:
            self._points.clear()
        self.step = step
        self.held_out = record.get("eval_loss", self.held_out)
        if "loss" not in record:
            return
        self.note = ""
        self.loss = record["loss"]
        self._points.append((float(record.get("time", 0.0)), step))
        self.rate, self.rate_unit = rate_of(record) or (self.rate, self.rate_unit)

    def add_event(self, record: dict[str, Any]) -> str:
        """Add one event; return the line to print about it, or an empty text."""
        line, self.note = _describe(record, self.note)
        if self._is_foreign and record.get("event") in ("started", "resumed", "restarted"):
            self.note = _RUNS
        self._is_local = record.get("launcher", "local" if self._is_local else "") == "local"
        if self._is_local and record.get("event") == "signalled":
            line = ""  # The command has already answered the Ctrl-C.
        if record.get("event") in ("started", "resumed"):
            self._points.clear()
            self.step = int(record.get("step", self.step))
        return line

    @property
    def remaining_s(self) -> float | None:
        """Seconds to go at the pace of the last logged steps; None before two steps, or without a total."""
        if len(self._points) < 2 or self.total_steps is None:
            return None
        (first_time, first_step), (last_time, last_step) = self._points[0], self._points[-1]
        if last_step <= first_step or last_time <= first_time:
            return None
        return (self.total_steps - last_step) * (last_time - first_time) / (last_step - first_step)

    def progress(self, step: object) -> str:
        """Return a step and the total, if there is one: `10/40` or `10`."""
        return str(step) if self.total_steps is None else f"{step}/{self.total_steps}"

    def facts(self) -> list[str]:
        """Return the known facts of loss, held-out loss, speed and time to go."""
        known = [f"loss {self.loss:.3f}" if self.loss is not None else ""]
        known.append(f"held-out {self.held_out:.3f}" if self.held_out is not None else "")
        known.append(f"{_short(self.rate)} {self.rate_unit}" if self.rate is not None else "")
        left = self.remaining_s
        known.append(f"{countdown(left)} left" if left is not None else "")
        return [fact for fact in known if fact]


def _describe(record: dict[str, Any], note: str) -> tuple[str, str]:
    """Return the line for an event, and the note to show until the next step."""
    event, attempt = record.get("event"), record.get("attempt", 0)
    if event == "submitted":
        return f"submitted as job {record.get('job_id')}", "waiting in the queue"
    if event == "started":
        where = record.get("nodes") or "this machine"
        return f"attempt {attempt} starts on {where}", "starting: importing torch, preparing the data"
    if event in ("warned", "straggler"):
        return str(record.get("text", "")), note
    if event == "preflight" and not record.get("failed"):
        nodes = counted(int(record.get("nodes", 1)), "node")
        return f"preflight passed: {nodes} in {record.get('seconds', 0):.1f} s", note
    if event == "resumed":
        return f"resuming from step {record.get('step')}", "preparing the data"
    if event == "signalled":
        return f"stopping at a checkpoint ({stop_reason(stop_source(record))})", "saving"
    if event == "stalled":
        return "", f"rank {record.get('rank')} on {record.get('host')} hangs: ending the ranks"
    if event == "rank_failed":
        return from_facts(record).sentence, "ending the other ranks"
    if event == "restarted":
        step = record.get("step", -1)
        reached = f"; they had reached step {step}" if isinstance(step, int) and step >= 0 else ""
        which = ", ".join(filter(None, [f"restart {restart_count(record)}", other_places(record)]))
        return f"the ranks restart in place ({which}){reached}", "starting"
    if event == "ended":
        finished = record.get("outcome") == "finished"
        return ("" if finished else f"attempt {attempt} ended: {record.get('outcome')}"), ""
    return "", "" if event == "first_step" else note


def countdown(seconds: float) -> str:
    """Return a duration as `M:SS` or `H:MM:SS`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}" if number >= 10 else f"{number:.2f}"


class RunView:
    """A view of one run; a context manager whose `tick` is called by its owner.

    Args:
        folder: the run folder.
        total_steps: the number of optimizer steps of the run; None if only its program knows it.
        stream: the output (default: stdout).
        live: whether to draw a progress bar (None: if `stream` is a terminal).
        output: whether to show the output of rank 0, for a program that may write no metrics.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        total_steps: int | None,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        output: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reading = Reading(total_steps, is_foreign=output)
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty() if live is None else live
        self._metrics, self._events = _new_lines(folder.metrics_file), _new_lines(folder.attempts_file)
        self._folder, self._output = folder, output
        self._reader: LineReader | None = None
        self._now = now
        self._shown_at = float("-inf")
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> RunView:
        if self._live:
            bar = _progress(self._stream)
            with _discard_if_unread(self._stream):
                self._task = bar.add_task("", total=None, step="", facts="")
                bar.start()
                self._bar = bar
        self.tick()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick()
        self._show_output(is_complete=True)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def tick(self) -> None:
        """Read new records of the run and show them."""
        records = [*new_records(self._events), *new_records(self._metrics)]
        for record in sorted(records, key=_written_at):
            if "event" not in record:
                self.reading.add_metric(record)
                self._show_record(record)
            elif line := self.reading.add_event(record):
                self.say(line)
            if self._output and record.get("event") == "started":
                self._show_output(is_complete=True)
                self._reader = LineReader(self._folder.rank_log(int(record["attempt"]), 0))
        self._show_output()
        self._draw()

    def _show_output(self, *, is_complete: bool = False) -> None:
        """Show the new lines of rank 0; of a complete output also a last line without a line break."""
        if self._reader is None:
            return
        for line in [*self._reader.read(), *(self._reader.flush() if is_complete else ())]:
            self.say(line)

    def say(self, text: str) -> None:
        """Print one line, above the bar if there is one. An output that nobody reads is no error."""
        with _discard_if_unread(self._stream):
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self._stream, flush=True)

    def _show_record(self, record: dict[str, Any]) -> None:
        step = f"step {self.reading.progress(record.get('step'))}"
        if isinstance(record.get("eval_loss"), (int, float)):
            own = [f"{name} {record[name]:.4f}" for name in own_names([record])]
            self.say("  ".join([step, f"held-out loss {record['eval_loss']:.4f}", *own]))
        elif self._bar is None and self._now() - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = self._now()
            self.say("  ".join([step, *self.reading.facts()]))

    def _draw(self) -> None:
        if self._bar is None or self._task is None:
            return
        reading = self.reading
        begun = reading.step > 0
        self._bar.update(
            self._task,
            total=reading.total_steps if begun else None,
            completed=reading.step if begun else 0,
            step=reading.progress(reading.step) if begun else "",
            facts=reading.note or "  ".join(reading.facts()),
        )
        with _discard_if_unread(self._stream):
            self._bar.refresh()


@contextmanager
def _discard_if_unread(stream: TextIO) -> Iterator[None]:
    """Discard all further output after the stream can't be written any more.

    Examples are `slurmddp train | head -1`, a closed terminal, and a full disk.
    """
    try:
        yield
    except OSError:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _progress(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        BarColumn(bar_width=None),
        TextColumn("{task.fields[step]}", markup=False),
        TextColumn("{task.fields[facts]}", markup=False),
        console=Console(file=stream, force_terminal=True, soft_wrap=False),
        auto_refresh=False,
        expand=True,
    )
