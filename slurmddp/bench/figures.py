"""Draw the pictures of a benchmark as SVG, for its HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from slurmddp.bench.results import Result, Row
from slurmddp.bench.settings import size_label
from slurmddp.pages.drawing import COLOURS, LINES, Size, add_legend, is_wide, label_axes, new_figure, picture
from slurmddp.runs.text_format import BYTES, SECONDS, scaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ALGORITHMS = ("ring", "halving_doubling", "tree", "central_server", "sharded_server", "all_gather")
_PARTS = {
    "compute_s": ("compute", "#2f6fde"),
    "exposed_s": ("exposed communication", "#c2570c"),
    "optimizer_s": ("optimizer", "#2a9d6f"),
    "data_s": ("data", "#c9a227"),
}


def pictures(result: Result) -> dict[str, dict[str, str]]:
    """Return the pictures of a result: by title, SVG texts for "wide" and "narrow" screens.

    Raises:
        SlurmddpError: matplotlib is not installed.
    """
    tables = result.tables
    drawn = {}

    all_reduce = tables.get("all_reduce")
    if all_reduce:
        drawn["Bus bandwidth by size"] = picture("bandwidth", partial(_bandwidth, all_reduce))

    curves = result.model.get("curves")
    if curves:
        title = "Time that the cost model predicts, by number of nodes"
        height = 1.0 + 2.4 * len({row["bytes"] for row in curves})
        drawn[title] = picture("curves", partial(_curves, curves), narrow=(4.6, height))

    measured = [row for row in tables.get("strategies", ()) if "mean_s" in row]
    if measured:
        height = 1.5 + 0.42 * len(measured)
        drawn["Parts of a step"] = picture(
            "parts", partial(_step_parts, measured), wide=(9.2, height), narrow=(4.6, height)
        )

    scaling = tables.get("scaling")
    if scaling:
        drawn["Scaling efficiency"] = picture("scaling", partial(_scaling, scaling))

    return drawn


def _add_legend(figure: Figure, size: Size, axes: Axes) -> None:
    """Add one legend above all panels; its entries are the lines of `axes`, the same in every panel."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 4 if is_wide(size) else 2
    add_legend(figure, handles=handles, labels=labels, loc="outside upper center", ncols=columns)


def _line(algorithm: str) -> dict[str, Any]:
    """Return matplotlib's line style for an algorithm, the same in all pictures; torch's line is dashed."""
    if algorithm not in _ALGORITHMS:
        return {"color": COLOURS["ink"], "linewidth": 1.8, "linestyle": (0, (4, 2))}
    return {"color": LINES[_ALGORITHMS.index(algorithm)], "linewidth": 1.8}


def _show_units(axes: Axes, units: Sequence[tuple[float, str]], per: str = "") -> None:
    """Make the y axis logarithmic, with labels such as "10 ms" instead of 10^-2.

    `per` is a text after each unit, such as "/s".
    """
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: scaled(value, units) + per)
    axes.minorticks_off()


def _bandwidth(rows: Sequence[Row], size: Size) -> Figure:
    figure, (axes,) = new_figure(size)
    sizes = sorted({row["bytes"] for row in rows})

    for name in dict.fromkeys(row["algorithm"] for row in rows):
        rows_of_algorithm = [row for row in rows if row["algorithm"] == name]
        xs = [row["bytes"] for row in rows_of_algorithm]
        ys = [row["bus_bytes_per_s"] for row in rows_of_algorithm]
        axes.plot(xs, ys, label=name, marker="o", markersize=4, **_line(name))

    axes.set_xscale("log")
    axes.set_xticks(sizes, list(map(size_label, sizes)))
    _show_units(axes, BYTES, "/s")
    label_axes(axes, "size of the tensor", "bus bandwidth")
    _add_legend(figure, size, axes)
    return figure


def _curves(curves: Sequence[Row], size: Size) -> Figure:
    bytes_reduced = sorted({row["bytes"] for row in curves})
    figure, panels = new_figure(size, len(bytes_reduced))
    for axes, count in zip(panels, bytes_reduced, strict=True):
        rows = [row for row in curves if row["bytes"] == count]
        drawn: list[list[float]] = []
        for row in rows:
            # The model predicts equal times for algorithms with equal work, such as sharded server and ring.
            # They share a line with both names, because a second line would cover the first.
            if row["seconds"] in drawn:
                continue
            drawn.append(row["seconds"])
            algorithms = [other["algorithm"] for other in rows if other["seconds"] == row["seconds"]]
            axes.plot(row["ranks"], row["seconds"], label=", ".join(algorithms), **_line(row["algorithm"]))

        axes.set_xscale("log", base=2)
        axes.set_xticks([2, 16, 128, 1024], ["2", "16", "128", "1024"])
        _show_units(axes, SECONDS)
        label_axes(axes, "nodes", "", size_label(count))

    _add_legend(figure, size, panels[0])
    return figure


def _step_parts(rows: Sequence[Row], size: Size) -> Figure:
    figure, (axes,) = new_figure(size)
    names = [row["strategy"] for row in rows]
    left = [0.0] * len(rows)
    for part, (label, colour) in _PARTS.items():
        # `exposed_s` is a difference of measured times, so noise can make it slightly negative, and a bar
        # can't have a negative width.
        widths = [max(0.0, 1e3 * row[part]) for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=label, height=0.62, zorder=2)
        left = [start + width for start, width in zip(left, widths, strict=True)]

    for name, row, end in zip(names, rows, left, strict=True):
        label = scaled(row["mean_s"], SECONDS)
        axes.annotate(
            label, (end, name), (4, 0), textcoords="offset points", va="center", fontsize=8.5,
            color=COLOURS["muted"],
        )  # fmt: skip

    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    label_axes(axes, "ms in a step", "")
    axes.grid(visible=False, axis="y")
    _add_legend(figure, size, axes)
    return figure


def _scaling(rows: Sequence[Row], size: Size) -> Figure:
    figure, (axes,) = new_figure(size)
    ticks = sorted({row["ranks"] for row in rows})
    for kind, colour in zip(dict.fromkeys(row["scaling"] for row in rows), LINES, strict=False):
        rows_of_kind = [row for row in rows if row["scaling"] == kind]
        xs = [row["ranks"] for row in rows_of_kind]
        ys = [100 * row["efficiency"] for row in rows_of_kind]
        axes.plot(xs, ys, color=colour, label=f"{kind} scaling", marker="o", linewidth=1.8)

    axes.axhline(100, color=COLOURS["muted"], linewidth=0.9, linestyle=(0, (3, 3)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(ranks) for ranks in ticks])
    axes.set_ylim(bottom=0)
    label_axes(axes, "ranks", "efficiency in %")
    _add_legend(figure, size, axes)
    return figure
