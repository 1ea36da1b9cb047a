"""Write the report of a sweep: an HTML page that compares its runs and links to their reports."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slurmddp.pages import drawing
from slurmddp.pages.page import write_page
from slurmddp.pages.table import Cell, Column, Table, table
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report import parallel
from slurmddp.runs.report.differing_settings import as_text, settings_of, settings_that_differ
from slurmddp.runs.report.goodput import Goodput, read_goodput
from slurmddp.runs.report.html import TONES
from slurmddp.runs.status.compared_metric import ComparedMetric, compared_metric
from slurmddp.runs.status.metrics import Curve, Metrics, read
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.runs.text_format import counted, number, shorter

_MOST_AXES = 7
"""Largest number of settings in the picture; the table shows all settings."""

_UNCLEAR = frozenset({"_target_", "name", "path"})
"""Last parts of keys that are unclear alone, so that a table shows the whole keys."""


@dataclass(frozen=True)
class Compared:
    """A run of a sweep with everything that the page shows about it."""

    status: RunStatus
    settings: Mapping[str, Any]
    metrics: Metrics
    goodput: Goodput
    result: float | None


def write_sweep_report(
    file: Path, name: str, statuses: Sequence[RunStatus], *, missing: int = 0, best: str = ""
) -> Path:
    """Write the HTML page that compares the runs of a sweep, and return its path.

    Args:
        file: the path of the page; the run folders are in the same folder.
        name: the name of the sweep.
        statuses: the statuses of its runs, whose reports have been written.
        missing: the number of points without a run folder.
        best: for a search, the mode and name of its metric, such as "max accuracy".

    Raises:
        SlurmddpError: matplotlib is missing, or a run folder can't be read.
    """
    now = time.time()
    folders = [RunFolder(status.path) for status in statuses]
    metrics = [read(folder) for folder in folders]
    result = compared_metric(folders, metrics, best)

    runs: list[Compared] = []
    for status, folder, curves in zip(statuses, folders, metrics, strict=True):
        goodput = read_goodput(folder, status, now)
        value = result.value(curves) if result else None
        runs.append(Compared(status, settings_of(folder), curves, goodput, value))
    runs.sort(key=partial(_place, result))

    differ = settings_that_differ(*(run.settings for run in runs))
    return write_page(
        file,
        "sweep.html.j2",
        kind="Sweep",
        name=name,
        states=_states(runs),
        hours=_hours(runs),
        runs=_table(runs, differ, result),
        picture=_picture(runs, differ, result),
        caption=_caption(runs, differ, result),
        count=len(runs),
        missing=missing,
        result=result,
    )


def _place(result: ComparedMetric | None, run: Compared) -> tuple[bool, float]:
    """Return the sort key with which the best run comes first and runs without a result come last."""
    if result is None or run.result is None:
        return True, 0.0
    return False, {"min": run.result, "max": -run.result}.get(result.mode, 0.0)


def _table(
    runs: Sequence[Compared], differ: Mapping[str, Sequence[Any]], result: ComparedMetric | None
) -> Table:
    labels = _short_names(differ)
    columns = [Column(labels[key], values, _setting, "number") for key, values in differ.items()]
    columns.append(Column("steps", [run.status.step for run in runs], "{:,}".format, "number"))

    best = None
    if result is not None:
        columns.append(Column(result.label, [run.result for run in runs], number, "number"))
        if result.mode and runs and runs[0].result is not None:
            best = 0

    metrics = dict.fromkeys(name for run in runs for name in run.metrics.own)
    curves_by_name = {
        "training loss": [run.metrics.train for run in runs],
        "held-out loss": [run.metrics.held_out for run in runs],
        **{name: [run.metrics.own.get(name, Curve()) for run in runs] for name in metrics},
    }
    for name, curves in curves_by_name.items():
        last = [curve.values[-1] if len(curve) else None for curve in curves]
        columns.append(Column(name, last, number, "number"))

    for unit in _units(runs):
        hours = [run.goodput.hours if run.goodput.unit == unit else None for run in runs]
        columns.append(Column(unit, hours, "{:,.2f}".format, "number"))

    names = [_linked(run, is_best=at == best) for at, run in enumerate(runs)]
    states = [Cell(run.status.state, TONES[run.status.state]) for run in runs]
    return table(Column("Run", names), Column("State", states), *columns, best=best)


def _setting(value: Any) -> str:
    return shorter(as_text(value))


def _linked(run: Compared, *, is_best: bool) -> Cell:
    folder = RunFolder(run.status.path)
    link = ""
    if folder.report_file.exists():
        link = f"{quote(folder.name)}/{folder.report_file.name}"
    return Cell(folder.name, link=link, mark="best" if is_best else "")


def _short_names(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return a short name for each key: its last part, or the whole key.

    The whole key is used if several keys have the same last part, or if this part is in `_UNCLEAR`.
    """
    last_parts = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(last_parts.values())
    unclear = {short for short in counts if counts[short] > 1 or short in _UNCLEAR}
    return {key: key if short in unclear else short for key, short in last_parts.items()}


def _picture(
    runs: Sequence[Compared], differ: Mapping[str, Sequence[Any]], result: ComparedMetric | None
) -> dict[str, str]:
    """Return the parallel coordinates plot of the runs with a result, in the formats of `drawing.picture`.

    The result is empty if fewer than two runs have a result, or if no setting differs.
    """
    indices = [index for index, run in enumerate(runs) if run.result is not None]
    if result is None or len(indices) < 2 or not differ:
        return {}

    labels = _short_names(differ)
    axes = [
        parallel.setting_axis(labels[key], [values[index] for index in indices])
        for key, values in list(differ.items())[:_MOST_AXES]
    ]
    axes.append(parallel.number_axis(result.label, [runs[index].result or 0.0 for index in indices]))

    best = 0 if result.mode else None
    draw = partial(parallel.draw, axes, best)
    return drawing.picture("parallel", draw, narrow=(4.0, parallel.height(len(axes))))


def _caption(runs: Sequence[Compared], differ: Mapping[str, Any], result: ComparedMetric | None) -> str:
    sentences = ["Each line is a run."]
    if result is not None and result.mode:
        sentences = [f"Each line is a run; the orange line has the best value, the {result.mode}imum."]
    if len(differ) > _MOST_AXES:
        sentences.append(f"The first {_MOST_AXES} of {len(differ)} settings are drawn.")

    lacking = sum(run.result is None for run in runs)
    if lacking:
        sentences.append(f"Left out, without a result: {counted(lacking, 'run')}.")
    return " ".join(sentences)


def _states(runs: Sequence[Compared]) -> list[tuple[str, str, int]]:
    """Return each state of a run with its colour (see `TONES`) and the number of runs in this state."""
    states = [run.status.state for run in runs]
    return [(state, TONES[state], states.count(state)) for state in dict.fromkeys(sorted(states))]


def _hours(runs: Sequence[Compared]) -> str:
    return ", ".join(
        f"{math.fsum(run.goodput.hours for run in runs if run.goodput.unit == unit):,.2f} {unit}"
        for unit in _units(runs)
    )


def _units(runs: Sequence[Compared]) -> list[str]:
    return sorted({run.goodput.unit for run in runs})
