"""Read the metrics of rank 0; steps that were repeated after a restart count once."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slurmddp.errors import unreadable
from slurmddp.host.regular_file import open_regular
from slurmddp.runs.folder.jsonl import warn_once
from slurmddp.runs.folder.late_files import is_there
from slurmddp.runs.folder.layout import RunFolder

_BLOCK = 1 << 16
_LATEST_BYTES = 8 << 20
"""Most bytes that `latest` reads. It would read the whole file if a program never logs one of the losses."""
_GAP_S = 60.0
"""Shortest pause between two logged steps that counts as a gap, in seconds."""
_GAP_RATIO = 10
"""Shortest pause that counts as a gap, as a multiple of the time that its steps usually take."""
RATE_WINDOW = 12
"""Number of logged steps from which the remaining time is computed."""
_TRAINING = b"loss"
_AS_LOGGED = re.compile(
    rb'^\{"step": (\d+), "attempt": (\d+), "time": (\d{1,14}(?:\.\d+)?)'
    rb'(?:[^\n]*?"((?:eval_)?loss)": )?[^\n]*\}$',
    re.MULTILINE,
)
"""A line as `RunLog` writes it; other lines are read as JSON."""
KNOWN = frozenset({"step", "attempt", "time", "loss", "eval_loss", "lr", "grad_norm", "tflops", "mfu"})
"""Names of the values that slurmddp's trainer logs; a program's own values have other names."""


@dataclass(frozen=True)
class Curve:
    """The values of a metric in the order of the steps."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class LoggedStep:
    """The last step that an attempt logged, and when it was logged, in seconds since the epoch."""

    step: int
    time: float


@dataclass(frozen=True)
class Gap:
    """A long pause between two consecutive logged steps of one attempt, such as of a suspended job.

    The fields are seconds since the epoch.
    """

    before: float
    """Time of the line before the gap's first line."""
    since: float
    """Time of the gap's first line."""
    stopped: float
    """Time at which the steps between the two lines would have been done at their usual speed."""
    until: float
    """Time of the gap's last line; infinity after the last line of the attempt."""

    def is_long(self, until: float) -> bool:
        """Return whether the gap would still be long enough to count as one if it had ended at `until`."""
        return _is_long(until - self.since, self.stopped - self.since)


@dataclass(frozen=True)
class LineTimes:
    """The last logged step and the gaps of each attempt, from the times in `metrics.jsonl`."""

    logged: Mapping[int, LoggedStep]
    """The last step of each attempt."""
    gaps: Mapping[int, Sequence[Gap]]
    """The gaps of each attempt of slurmddp's own trainer; other programs log at times of their own."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The curves and values in `metrics.jsonl`, for the report."""

    train: Curve
    held_out: Curve
    rate: float | None
    """Median of the logged rates, because single steps are slow: the first step, or a step beside a save."""
    rate_unit: str
    logged: Mapping[int, LoggedStep]
    """The last step of each attempt."""
    lr: Curve = Curve()
    grad_norm: Curve = Curve()
    """The gradient norm before clipping, the mean since the line before."""
    own: Mapping[str, Curve] = field(default_factory=dict)
    """The values that a program has logged under names of its own."""


@dataclass(frozen=True, kw_only=True)
class Latest:
    """The newest values in `metrics.jsonl`, for `slurmddp status`; a value that the file lacks is None."""

    step: int | None = None
    time: float | None = None
    attempt: int | None = None
    loss: float | None = None
    held_out: float | None = None
    rate: float | None = None
    rate_unit: str = "tokens/s"
    tflops: float | None = None
    mfu: float | None = None
    own: Mapping[str, float] = field(default_factory=dict)
    """The newest values that a program has logged under names of its own."""


def read(folder: RunFolder) -> Metrics:
    """Return the values in a run's `metrics.jsonl`; if attempts share a step, the last attempt counts."""
    records = list(_records(folder.metrics_file))
    steps = _by_step(records)
    logged_rates = map(rate_of, (step for step in steps if "loss" in step))
    rates = [pair for pair in logged_rates if pair is not None]
    rate = None
    rate_unit = "tokens/s"
    if rates:
        rate = statistics.median(value for value, _ in rates)
        rate_unit = rates[-1][1]

    logged = {}
    for record in records:
        time = seconds_or_none(record.get("time"))
        if time is not None:
            logged[record.get("attempt", 0)] = LoggedStep(record["step"], time)

    return Metrics(
        train=curve(steps, "loss"),
        held_out=curve(steps, "eval_loss"),
        rate=rate,
        rate_unit=rate_unit,
        logged=logged,
        lr=curve(steps, "lr"),
        grad_norm=curve(steps, "grad_norm"),
        own={name: curve(steps, name) for name in own_names(records)},
    )


def read_steps(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the numbers that a run has logged at each step, in the order of the steps.

    Returns:
        For each step a dictionary with "step", "attempt", "time", and the logged values by name. If attempts
        share a step, the value of the last attempt counts.
    """
    return _by_step(_records(folder.metrics_file))


def _by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the records of each step, and return one dictionary for each step, in the order of the steps.

    Values that are no numbers are left out. Of several attempts, the value of the last one counts.
    """
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        numbers = {name: value for name, value in record.items() if _number(value) is not None}
        known = steps.get(record["step"], {})
        if record.get("attempt", 0) >= known.get("attempt", 0):
            steps[record["step"]] = {**known, **numbers}
        else:
            steps[record["step"]] = {**numbers, **known}

    return [steps[step] for step in sorted(steps)]


def curve(steps: Iterable[Mapping[str, Any]], name: str) -> Curve:
    """Return the curve of the values with this name.

    Args:
        steps: the numbers of each step, as `read_steps` returns them.
        name: the name of the values, such as "loss".
    """
    points = [(step["step"], float(step[name])) for step in steps if name in step]
    return Curve(tuple(step for step, _ in points), tuple(value for _, value in points))


class _Line(NamedTuple):
    step: int
    attempt: int
    time: float
    loss: bytes
    """`loss` for a line of training, `eval_loss` of an evaluation; empty for other values."""


def read_times(folder: RunFolder) -> LineTimes:
    """Return the times in a run's `metrics.jsonl`.

    The values are not parsed, because a long training has 100,000 lines.
    """
    stream = _open(folder.metrics_file)
    if stream is None:
        return LineTimes({}, {})
    with stream:
        text = stream.read()
    # The last line is left out if it is not complete.
    text = text[: text.rfind(b"\n") + 1]

    logged = _AS_LOGGED.findall(text)
    if len(logged) == text.count(b"\n"):
        lines = [_Line(int(step), int(number), float(time), loss) for step, number, time, loss in logged]
        return _times_of(lines)

    records = filter(None, map(_parse, text.split(b"\n")))
    return line_times(records)


def line_times(records: Iterable[Mapping[str, Any]]) -> LineTimes:
    """Return the times in records of `metrics.jsonl`.

    Args:
        records: the parsed lines, in the order of the file.
    """
    lines = []
    for record in records:
        time = seconds_or_none(record.get("time"))
        if time is not None:
            loss = next((key for key in ("eval_loss", "loss") if key in record), "")
            lines.append(_Line(record["step"], record.get("attempt", 0), time, loss.encode()))
    return _times_of(lines)


def _times_of(lines: Iterable[_Line]) -> LineTimes:
    logged: dict[int, _Line] = {}
    of_trainer: dict[int, list[_Line]] = {}
    for line in lines:
        logged[line.attempt] = line
        if line.loss:
            of_trainer.setdefault(line.attempt, []).append(line)

    return LineTimes(
        {attempt: LoggedStep(line.step, line.time) for attempt, line in logged.items()},
        {attempt: _gaps_between(lines) for attempt, lines in of_trainer.items()},
    )


def _gaps_between(lines: Sequence[_Line]) -> list[Gap]:
    """Return the gaps between the training lines of one attempt, and a gap after the last line.

    A pause is a gap if it is at least `_GAP_S` and `_GAP_RATIO` times the usual time of its steps. Pauses
    beside an evaluation do not count.
    """
    intervals = []
    for at, (first, second) in enumerate(pairwise(lines)):
        steps = second.step - first.step
        # Without `steps > 0`, a rollback would count: the first line after it has a lower step.
        if first.loss == second.loss == _TRAINING and steps > 0:
            intervals.append((at, steps, second.time - first.time))
    if not intervals:
        return []

    step_s = max(0.0, statistics.median(seconds / steps for _, steps, seconds in intervals))
    long_gaps = []
    for at, steps, seconds in intervals:
        if at > 0 and _is_long(seconds, steps * step_s):
            before, since, until = (line.time for line in lines[at - 1 : at + 2])
            long_gaps.append(Gap(before, since, since + steps * step_s, until))

    if lines[-1].loss == _TRAINING:
        usual_s = intervals[-1][1] * step_s
        before, since = (line.time for line in lines[-2:])
        long_gaps.append(Gap(before, since, since + usual_s, math.inf))
    return long_gaps


def _is_long(seconds: float, usual_s: float) -> bool:
    return seconds >= max(_GAP_S, _GAP_RATIO * usual_s)


def latest(folder: RunFolder) -> Latest:
    """Return the newest values in a run's `metrics.jsonl`, which is read from its end."""
    newest: dict[str, Any] = {}
    losses: dict[str, Any] = {}
    held_out: float | None = None
    named: dict[str, float] = {}
    last_needed_step: int | None = None

    for record in _backwards(folder.metrics_file):
        if last_needed_step is not None and record["step"] != last_needed_step:
            break
        newest = newest or record
        if not losses and "loss" in record:
            losses = record
        if held_out is None:
            held_out = _number(record.get("eval_loss"))
        for name in own_names([record]):
            named.setdefault(name, float(record[name]))
        # Reading ends only before the next earlier step: other lines of this step may hold further values.
        if last_needed_step is None and losses and held_out is not None:
            last_needed_step = record["step"]

    rate, unit = rate_of(losses) or (None, "tokens/s")
    return Latest(
        step=newest.get("step"),
        time=_number(newest.get("time")),
        attempt=newest.get("attempt", 0) if newest else None,
        loss=_number(losses.get("loss")),
        held_out=held_out,
        rate=rate,
        rate_unit=unit,
        tflops=_number(losses.get("tflops")),
        mfu=_number(losses.get("mfu")),
        own=dict(sorted(named.items())),
    )


def own_names(records: list[dict[str, Any]]) -> list[str]:
    """Return the sorted names of the values that a program has logged under names of its own."""
    names = {name for record in records for name in record.keys() - KNOWN if not name.endswith("_per_s")}
    return sorted(name for name in names if any(_number(record.get(name)) is not None for record in records))


def _number(value: Any) -> float | None:
    # Without this test, True would count as 1: in Python a bool is an int.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def seconds_or_none(value: Any) -> float | None:
    """Return `value` as a float if it is a number from 0 to below 1e15, else None."""
    number = _number(value)
    if number is None or not 0 <= number < 1e15:
        return None
    return number


def seconds_left(points: Sequence[tuple[float, int]], total_steps: int | None) -> float | None:
    """Return the remaining seconds of a training at the speed of its last logged steps.

    Args:
        points: the time and the number of steps that were logged, without a restart between them.
        total_steps: the number of steps of the run; None if only its program knows it.

    Returns:
        None without a speed, or if the number of steps is unknown.
    """
    if len(points) < 2 or total_steps is None:
        return None

    first_time, first_step = points[0]
    last_time, last_step = points[-1]
    if last_step <= first_step or last_time <= first_time:
        return None
    return (total_steps - last_step) * (last_time - first_time) / (last_step - first_step)


def rate_of(record: dict[str, Any]) -> tuple[float, str] | None:
    """Return the training speed in a record and its unit: (12.5, "tokens/s") for `tokens_per_s: 12.5`.

    The first key that ends with `_per_s` counts; None if there is none.
    """
    for key, value in record.items():
        number = _number(value)
        if key.endswith("_per_s") and number is not None:
            return number, f"{key.removesuffix('_per_s')}/s"
    return None


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of `metrics.jsonl`; None if the line is damaged."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    if not isinstance(record.get("attempt", 0), int):
        return None
    return record


def _open(path: Path) -> BinaryIO | None:
    """Open a metrics file; log a warning and return None if it can't be read, None if it does not exist."""
    if not is_there(path):
        return None
    try:
        return open_regular(path)
    except OSError as error:
        warn_once(f"{unreadable(path, error).message} The steps and values in it are not shown.")
        return None


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file from its start; skip damaged lines."""
    stream = _open(path)
    if stream is None:
        return

    with stream:
        for line in stream:
            record = _parse(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record


def _backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file from its end, up to `_LATEST_BYTES`; skip damaged lines."""
    stream = _open(path)
    if stream is None:
        return

    with stream:
        end = stream.seek(0, os.SEEK_END)
        position = end
        rest = b""

        while position > 0 and end - position < _LATEST_BYTES:
            size = min(_BLOCK, position)
            position = stream.seek(position - size)
            # The first line of a block may begin in the block before it, so it is kept for the next
            # iteration.
            rest, *lines = (stream.read(size) + rest).split(b"\n")
            yield from (record for record in map(_parse, reversed(lines)) if record is not None)

        record = _parse(rest)
        if record is not None:
            yield record
