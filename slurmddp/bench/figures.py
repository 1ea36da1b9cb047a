"""The pictures of a benchmark, as SVG for its page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from slurmddp.bench.results import Result, Row
from slurmddp.bench.settings import size_label
from slurmddp.bench.units import BYTES, SECONDS, scaled
from slurmddp.runs.report.figures import COLOURS, figure_svg, new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("#c2570c", "#2f6fde", "#2a9d6f", "#a855c7", "#c9a227", "#d6457b", "#4fa3b8")
"""Colours that readers can distinguish on a white page and on a dark page."""
_ALGORITHMS = ("ring", "halving_doubling", "tree", "central_server", "sharded_server", "all_gather")
_PARTS = {
    "compute_s": ("compute", "#2f6fde"),
    "exposed_s": ("exposed communication", "#c2570c"),
    "optimizer_s": ("optimizer", "#2a9d6f"),
    "data_s": ("data", "#c9a227"),
}
_SIZE = (9.2, 3.9)


def pictures(result: Result) -> dict[str, str]:
    """Return the pictures of a result with their titles, as SVG; raises SlurmddpError without matplotlib."""
    tables, drawn = result.tables, {}
    if rows := tables.get("all_reduce"):
        drawn["Bus bandwidth by size"] = figure_svg("bandwidth", partial(_bandwidth, rows))
    if curves := result.model.get("curves"):
        drawn["Time that the cost model predicts, by number of nodes"] = figure_svg(
            "curves", partial(_curves, curves)
        )
    if rows := [row for row in tables.get("strategies", ()) if "mean_s" in row]:
        drawn["Parts of a step"] = figure_svg("parts", partial(_step_parts, rows))
    if rows := tables.get("scaling"):
        drawn["Scaling efficiency"] = figure_svg("scaling", partial(_scaling, rows))
    return drawn


def _figure(count: int, height: float = _SIZE[1]) -> tuple[Figure, list[Axes]]:
    figure = new_figure((_SIZE[0], height))
    return figure, [figure.add_subplot(1, count, number) for number in range(1, count + 1)]


def _legend(owner: Axes | Figure, **where: Any) -> None:
    owner.legend(frameon=False, labelcolor=COLOURS["ink"], fontsize=9, **where)


def _line(algorithm: str) -> dict[str, Any]:
    """Return the look of an algorithm's line, the same in all pictures; torch is the peer of all others."""
    if algorithm not in _ALGORITHMS:
        return {"color": COLOURS["ink"], "linewidth": 1.8, "linestyle": (0, (4, 2))}
    return {"color": _LINES[_ALGORITHMS.index(algorithm)], "linewidth": 1.8}


def _show_units(axes: Axes, units: Sequence[tuple[float, str]], per: str = "") -> None:
    """Write the ticks of a logarithmic axis as "10 ms" in place of a power of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: scaled(value, units) + per)
    axes.minorticks_off()


def _bandwidth(rows: Sequence[Row]) -> Figure:
    figure, (axes,) = _figure(1)
    sizes = sorted({row["bytes"] for row in rows})
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == name]
        xs, ys = [row["bytes"] for row in own], [row["bus_bytes_per_s"] for row in own]
        axes.plot(xs, ys, label=name, marker="o", markersize=4, **_line(name))
    axes.set_xscale("log")
    axes.set_xticks(sizes, [size_label(size) for size in sizes])
    _show_units(axes, BYTES, "/s")
    plain_axes(axes, "size of the tensor", "bus bandwidth")
    _legend(figure, loc="outside right upper")
    return figure


def _curves(curves: Sequence[Row]) -> Figure:
    sizes = sorted({row["bytes"] for row in curves})
    figure, panels = _figure(len(sizes))
    for axes, size in zip(panels, sizes, strict=True):
        own = [row for row in curves if row["bytes"] == size]
        drawn: list[list[float]] = []
        for row in own:
            if row["seconds"] in drawn:
                continue  # The sharded server has the work of the ring.
            drawn.append(row["seconds"])
            same = [other["algorithm"] for other in own if other["seconds"] == row["seconds"]]
            axes.plot(row["ranks"], row["seconds"], label=", ".join(same), **_line(row["algorithm"]))
        axes.set_xscale("log", base=2)
        axes.set_xticks([2, 16, 128, 1024], ["2", "16", "128", "1024"])
        _show_units(axes, SECONDS)
        plain_axes(axes, "nodes", "", size_label(size))
    _legend(figure, loc="outside upper center", ncols=3, handles=panels[0].lines)
    return figure


def _step_parts(rows: Sequence[Row]) -> Figure:
    figure, (axes,) = _figure(1, 1.3 + 0.42 * len(rows))
    names = [row["strategy"] for row in rows]
    left = [0.0] * len(rows)
    for part, (label, colour) in _PARTS.items():
        # Noise can make a part of a busy machine slightly negative.
        widths = [max(0.0, 1e3 * row[part]) for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=label, height=0.62, zorder=2)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    for name, row, end in zip(names, rows, left, strict=True):
        label = scaled(row["mean_s"], SECONDS)
        axes.annotate(
            label, (end, name), (4, 0), textcoords="offset points", va="center", fontsize=8.5,
            color=COLOURS["muted"],
        )  # fmt: skip
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    plain_axes(axes, "ms in a step", "")
    axes.grid(visible=False, axis="y")
    _legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return figure


def _scaling(rows: Sequence[Row]) -> Figure:
    figure, (axes,) = _figure(1)
    ticks = sorted({row["ranks"] for row in rows})
    for kind, colour in zip(dict.fromkeys(row["scaling"] for row in rows), _LINES, strict=False):
        own = [row for row in rows if row["scaling"] == kind]
        xs, ys = [row["ranks"] for row in own], [100 * row["efficiency"] for row in own]
        axes.plot(xs, ys, color=colour, label=f"{kind} scaling", marker="o", linewidth=1.8)
    axes.axhline(100, color=COLOURS["muted"], linewidth=0.9, linestyle=(0, (3, 3)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(one) for one in ticks])
    axes.set_ylim(bottom=0)
    plain_axes(axes, "ranks", "efficiency in %")
    _legend(axes, loc="lower left")
    return figure
