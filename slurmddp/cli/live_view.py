"""Show a running training: a progress bar on a terminal, plain lines elsewhere.

The view reads only files of the run folder (`metrics.jsonl`, `attempts.jsonl`, the log of rank 0). It starts
no thread: its owner calls `tick` a few times per second.
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
from slurmddp.runs.status.merged_logs import LineReader
from slurmddp.runs.status.metrics import RATE_WINDOW, own_names, rate_of, seconds_left
from slurmddp.runs.status.notices import other_places
from slurmddp.runs.text_format import counted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_EVERY_S = 5.0
"""Seconds between two lines with a step, if no progress bar is drawn."""
_RUNS = "running, no step reported"
"""The shown activity of a running program that may never report a step."""


def new_records(reader: LineReader) -> list[dict[str, Any]]:
    """Return the JSON records that were appended to a file since the last call."""
    return [record for line in reader.read() if (record := _parsed(line)) is not None]


def _new_lines(path: Path) -> LineReader:
    """Return a reader of the lines that are appended to a file from now on."""
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


class RunProgress:
    """The progress of a run, updated record by record.

    Args:
        total_steps: the number of optimizer steps of the run; None if only its program knows it.
        is_foreign: whether the program may report no steps. The activity after its start is then "running,
            no step reported", because nothing would end an activity such as "importing torch".
    """

    def __init__(self, total_steps: int | None, *, is_foreign: bool = False) -> None:
        self.total_steps = total_steps
        self._is_foreign = is_foreign
        self.step = 0
        self.loss: float | None = None
        self.held_out: float | None = None
        self.rate: float | None = None
        self.rate_unit = "tokens/s"
        self.activity = ""
        """The run's activity while no step ends: waiting, importing, saving."""
        self._points: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._is_local = False

    def add_metric(self, record: dict[str, Any]) -> None:
        """Add a record of `metrics.jsonl`."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        if step < self.step:
            # The ranks resumed from an older checkpoint, so the time since the last record is not a time of
            # steps.
            self._points.clear()

        self.step = step
        self.held_out = record.get("eval_loss", self.held_out)
        if "loss" not in record:
            return

        self.activity = ""
        self.loss = record["loss"]
        self._points.append((float(record.get("time", 0.0)), step))
        self.rate, self.rate_unit = rate_of(record) or (self.rate, self.rate_unit)

    def add_event(self, record: dict[str, Any]) -> str:
        """Add an event of `attempts.jsonl`; return the line to print about it, or an empty text."""
        line, self.activity = _describe(record, self.activity)
        if self._is_foreign and record.get("event") in ("started", "resumed", "restarted"):
            self.activity = _RUNS

        self._is_local = record.get("launcher", "local" if self._is_local else "") == "local"
        if self._is_local and record.get("event") == "signalled":
            # The launcher has already printed its answer to Ctrl-C.
            line = ""
        if record.get("event") in ("started", "resumed"):
            self._points.clear()
            self.step = int(record.get("step", self.step))

        return line

    @property
    def remaining_s(self) -> float | None:
        """The remaining seconds at the speed of the last logged steps.

        None before two steps are logged, or if the number of steps of the run is unknown.
        """
        return seconds_left(self._points, self.total_steps)

    def of_total(self, step: object) -> str:
        """Return a step, with the number of steps of the run if it is known: `10/40` or `10`."""
        return str(step) if self.total_steps is None else f"{step}/{self.total_steps}"

    def facts(self) -> list[str]:
        """Return loss, held-out loss, speed and remaining time as texts; unknown values are left out."""
        facts: list[str] = []
        if self.loss is not None:
            facts.append(f"loss {self.loss:.3f}")
        if self.held_out is not None:
            facts.append(f"held-out {self.held_out:.3f}")
        if self.rate is not None:
            facts.append(f"{_short(self.rate)} {self.rate_unit}")
        if self.remaining_s is not None:
            facts.append(f"{countdown(self.remaining_s)} left")

        return facts


def _describe(record: dict[str, Any], activity: str) -> tuple[str, str]:
    """Return the line to print about an event, and the run's activity to show in the progress bar.

    Args:
        record: the event, a record of `attempts.jsonl`.
        activity: the activity before the event; returned again if the event does not change it.

    Returns:
        The line, empty if nothing is printed, and the activity, empty if none is to be shown.
    """
    event = record.get("event")
    attempt = record.get("attempt", 0)
    if event == "submitted":
        return f"submitted as job {record.get('job_id')}", "waiting in the queue"
    if event == "started":
        nodes = record.get("nodes") or "this machine"
        return f"attempt {attempt} starts on {nodes}", "starting: importing torch, preparing the data"
    if event in ("warned", "straggler"):
        return str(record.get("text", "")), activity
    if event == "preflight" and not record.get("failed"):
        nodes = counted(int(record.get("nodes", 1)), "node")
        return f"preflight passed: {nodes} in {record.get('seconds', 0):.1f} s", activity
    if event == "resumed":
        return f"resuming from step {record.get('step')}", "preparing the data"
    if event == "signalled":
        return f"stopping at a checkpoint ({stop_reason(stop_source(record))})", "saving"
    if event == "stalled":
        return "", f"rank {record.get('rank')} on {record.get('host')} hangs: ending the ranks"
    if event == "rank_failed":
        return from_facts(record).sentence, "ending the other ranks"
    if event == "restarted":
        return _describe_restart(record), "starting"
    if event == "ended" and record.get("outcome") == "finished":
        return "", ""
    if event == "ended":
        return f"attempt {attempt} ended: {record.get('outcome')}", ""
    if event == "first_step":
        return "", ""

    return "", activity


def _describe_restart(record: dict[str, Any]) -> str:
    """Return the line about a restart of the ranks in place.

    The line has the number of the restart, the nodes if they changed, and the last step before the restart.
    """
    details = [f"restart {restart_count(record)}", other_places(record)]
    line = f"the ranks restart in place ({', '.join(filter(None, details))})"
    step = record.get("step", -1)
    if isinstance(step, int) and step >= 0:
        line += f"; they had reached step {step}"

    return line


def countdown(seconds: float) -> str:
    """Return a duration as `M:SS` or `H:MM:SS`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(number: float) -> str:
    """Return a number in short form, with a letter for thousands, millions or billions: `12.3k`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{letter}"
    if number >= 10:
        return f"{number:.0f}"
    return f"{number:.2f}"


class RunView:
    """The progress of one run on a screen: a context manager. Each call of `tick` shows new records.

    Args:
        folder: the run folder.
        total_steps: the number of optimizer steps of the run; None if only its program knows it.
        stream: the output; None: stdout.
        live: whether to draw a progress bar; None: only if `stream` is a terminal.
        output: whether to also show the output of rank 0, for a program that may write no metrics.
        now: returns the time in seconds.
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
        self.progress = RunProgress(total_steps, is_foreign=output)
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty() if live is None else live
        self._metrics = _new_lines(folder.metrics_file)
        self._events = _new_lines(folder.attempts_file)
        self._folder = folder
        self._output = output
        self._rank_log: LineReader | None = None
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
        """Read the records that the run has written since the last call, and show them."""
        records = [*new_records(self._events), *new_records(self._metrics)]
        for record in sorted(records, key=_written_at):
            if "event" not in record:
                self.progress.add_metric(record)
                self._show_record(record)
            elif line := self.progress.add_event(record):
                self.print(line)

            if self._output and record.get("event") == "started":
                self._show_output(is_complete=True)
                self._rank_log = LineReader(self._folder.rank_log(int(record["attempt"]), 0))

        self._show_output()
        self._draw()

    def _show_output(self, *, is_complete: bool = False) -> None:
        """Print the lines that rank 0 has written since the last call.

        Args:
            is_complete: whether to print a last line without a line break, because no more output follows.
        """
        if self._rank_log is None:
            return

        lines = list(self._rank_log.read())
        if is_complete:
            lines += self._rank_log.flush()
        for line in lines:
            self.print(line)

    def print(self, text: str) -> None:
        """Print a line, above the progress bar if there is one; ignore a stream that can't be written."""
        with _discard_if_unread(self._stream):
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self._stream, flush=True)

    def _show_record(self, record: dict[str, Any]) -> None:
        """Print a record of `metrics.jsonl` if it holds an evaluation.

        If no progress bar is drawn, other records are printed, too, but at most one in `PLAIN_EVERY_S`.
        """
        step = f"step {self.progress.of_total(record.get('step'))}"
        if isinstance(record.get("eval_loss"), (int, float)):
            metrics = [f"{name} {record[name]:.4f}" for name in own_names([record])]
            self.print("  ".join([step, f"held-out loss {record['eval_loss']:.4f}", *metrics]))
        elif self._bar is None and self._now() - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = self._now()
            self.print("  ".join([step, *self.progress.facts()]))

    def _draw(self) -> None:
        """Update the progress bar, if there is one."""
        if self._bar is None or self._task is None:
            return

        progress = self.progress
        facts = progress.activity or "  ".join(progress.facts())
        if progress.step > 0:
            total = progress.total_steps
            step = progress.of_total(progress.step)
        else:
            # With total=None, rich draws a moving bar: the run is busy, but has no step yet.
            total = None
            step = ""

        self._bar.update(self._task, total=total, completed=progress.step, step=step, facts=facts)
        with _discard_if_unread(self._stream):
            self._bar.refresh()


@contextmanager
def _discard_if_unread(stream: TextIO) -> Iterator[None]:
    """Redirect the stream to /dev/null if the block can't write to it; raise no error.

    This happens in `slurmddp train | head -1`, and with a closed terminal or a full disk.
    """
    try:
        yield
    except OSError:
        with suppress(OSError, ValueError):
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, stream.fileno())
            os.close(null_device)


def _progress(stream: TextIO) -> Progress:
    """Return the progress bar, with a column for the step and a column for losses, speed and time."""
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
