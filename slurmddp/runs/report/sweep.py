"""Write the report of a sweep: one HTML page that compares its runs, and links to the report of each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import slurmddp
from slurmddp.host.atomic_file import write_atomic
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report import figures, parallel
from slurmddp.runs.report.goodput import Goodput, read_goodput
from slurmddp.runs.report.html import TONES
from slurmddp.runs.report.settings import as_text, settings_of, settings_that_differ
from slurmddp.runs.status.compared_metric import ComparedMetric, compared_metric
from slurmddp.runs.status.metrics import Curve, Metrics, read
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.runs.text_format import counted, number, shorter
from slurmddp.templates import template

_MOST_AXES = 7
"""Settings in the picture, at most; the table shows all."""

_UNCLEAR = frozenset({"_target_", "name", "path"})


@dataclass(frozen=True)
class Compared:
    """One run of the sweep, with everything that the page shows of it."""

    status: RunStatus
    settings: Mapping[str, Any]
    metrics: Metrics
    goodput: Goodput
    result: float | None


@dataclass(frozen=True)
class Row:
    """One run in the table; `cells` are (column, text)."""

    name: str
    link: str
    state: str
    tone: str
    cells: tuple[tuple[str, str], ...]
    is_best: bool


def write_sweep_report(
    file: Path, name: str, found: Sequence[RunStatus], *, missing: int = 0, best: str = ""
) -> Path:
    """Write the page of a sweep, and return its path.

    Args:
        file: the page; the run folders lie beside it.
        name: of the sweep.
        found: the statuses of its runs, each with its report written.
        missing: how many points have no run folder.
        best: the metric of a search, such as "max accuracy".

    Raises:
        SlurmddpError: matplotlib is missing, or a run folder can't be read.
    """
    now = time.time()
    folders = [RunFolder(one.path) for one in found]
    metrics = [read(folder) for folder in folders]
    result = compared_metric(folders, metrics, best)
    results = [None if result is None else result.value(curves) for curves in metrics]
    runs = [
        Compared(one, settings_of(folder), curves, read_goodput(folder, one, now), value)
        for one, folder, curves, value in zip(found, folders, metrics, results, strict=True)
    ]
    runs.sort(key=partial(_place, result))
    differ = settings_that_differ(*(one.settings for one in runs))
    text = template("sweep.html.j2").render(
        name=name,
        states=_states(runs),
        hours=_hours(runs),
        rows=_rows(runs, differ, result),
        charts=_charts(runs, differ, result),
        caption=_caption(runs, differ, result),
        count=len(runs),
        missing=missing,
        result=result,
        written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        version=slurmddp.__version__,
    )
    write_atomic(file, text)
    return file


def _place(result: ComparedMetric | None, one: Compared) -> tuple[bool, float]:
    """Return the sort key: the best run first, runs without a result last."""
    if result is None or one.result is None:
        return True, 0.0
    return False, {"min": one.result, "max": -one.result}.get(result.mode, 0.0)


def _rows(
    runs: Sequence[Compared], differ: Mapping[str, Sequence[Any]], result: ComparedMetric | None
) -> list[Row]:
    own = list(dict.fromkeys(name for one in runs for name in one.metrics.own))
    labels = _short_names(differ)
    rows = []
    for at, one in enumerate(runs):
        cells = [(labels[key], shorter(as_text(values[at]))) for key, values in differ.items()]
        cells.append(("steps", "-" if one.status.step is None else f"{one.status.step:,}"))
        if result is not None:
            cells.append((result.label, number(one.result)))
        cells += [
            (label, number(_last(curve)))
            for label, curve in (
                ("training loss", one.metrics.train),
                ("held-out loss", one.metrics.held_out),
                *((name, one.metrics.own.get(name, Curve())) for name in own),
            )
        ]
        cells.append((one.goodput.unit, f"{one.goodput.hours:,.2f}"))
        is_best = at == 0 and result is not None and bool(result.mode) and one.result is not None
        rows.append(_row(one, cells, is_best))
    return _without_empty(rows)


def _row(one: Compared, cells: Sequence[tuple[str, str]], is_best: bool) -> Row:
    folder = RunFolder(one.status.path)
    link = f"{quote(folder.name)}/{folder.report_file.name}" if folder.report_file.exists() else ""
    return Row(folder.name, link, one.status.state, TONES[one.status.state], tuple(cells), is_best)


def _last(curve: Curve) -> float | None:
    return curve.values[-1] if len(curve) else None


def _without_empty(rows: Sequence[Row]) -> list[Row]:
    """Leave out the columns that are empty in all rows."""
    kept = {at for row in rows for at, (_, text) in enumerate(row.cells) if text != "-"}
    return [
        Row(row.name, row.link, row.state, row.tone, tuple(row.cells[at] for at in sorted(kept)), row.is_best)
        for row in rows
    ]


def _short_names(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return the last part of each key, or the whole key if its last part alone says too little."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: key if last.count(short) > 1 or short in _UNCLEAR else short
        for key, short in zip(keys, last, strict=True)
    }


def _charts(
    runs: Sequence[Compared], differ: Mapping[str, Sequence[Any]], result: ComparedMetric | None
) -> dict[str, str]:
    """Return the parallel coordinates, wide and narrow; empty if fewer than two runs have a result."""
    at = [number for number, one in enumerate(runs) if one.result is not None]
    if result is None or len(at) < 2 or not differ:
        return {}
    labels = _short_names(differ)
    axes = [
        parallel.setting_axis(labels[key], [values[number] for number in at])
        for key, values in list(differ.items())[:_MOST_AXES]
    ]
    axes.append(parallel.number_axis(result.label, [runs[number].result or 0.0 for number in at]))
    best = 0 if result.mode else None
    sizes = {"wide": (9.2, 3.9), "narrow": (4.0, parallel.height(len(axes)))}
    return {
        name: figures.figure_svg(f"parallel-{name}", partial(parallel.draw, axes, best, size=size))
        for name, size in sizes.items()
    }


def _caption(runs: Sequence[Compared], differ: Mapping[str, Any], result: ComparedMetric | None) -> str:
    words = ["Each line is a run."]
    if result is not None and result.mode:
        words[0] = f"Each line is a run; the orange line has the best value, the {result.mode}imum."
    if len(differ) > _MOST_AXES:
        words.append(f"The first {_MOST_AXES} of {len(differ)} settings are drawn.")
    if lacking := sum(one.result is None for one in runs):
        words.append(f"Left out, without a result: {counted(lacking, 'run')}.")
    return " ".join(words)


def _states(runs: Sequence[Compared]) -> list[tuple[str, str, int]]:
    """Return the states, their tones, and how many runs are in each."""
    states = [one.status.state for one in runs]
    return [(state, TONES[state], states.count(state)) for state in dict.fromkeys(sorted(states))]


def _hours(runs: Sequence[Compared]) -> str:
    units = {one.goodput.unit for one in runs}
    return ", ".join(
        f"{math.fsum(one.goodput.hours for one in runs if one.goodput.unit == unit):,.2f} {unit}"
        for unit in sorted(units)
    )
