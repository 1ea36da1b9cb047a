"""Draw the loss of a run over its steps, as PNG and as SVG for the report."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.errors import SlurmddpError
from slurmddp.host.atomic_file import replacing
from slurmddp.runs.status.metrics import Curve, Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "train": "#2f6fde",
    "held": "#c2570c",
    "ink": "#1c2024",
    "muted": "#60646d",
    "line": "#e3e5ea",
    "card": "#fefefe",
}
"""Colours on white; on a page each becomes the variable of this name."""
_MOST_POINTS = 800
"""Points of a curve, at most: a screen can't show more, and they make the page heavy."""


def has_points(metrics: Metrics) -> bool:
    """Return whether there is a point to draw."""
    return any(math.isfinite(value) for curve in (metrics.train, metrics.held_out) for value in curve.values)


def write_png(metrics: Metrics, starts: Mapping[int, int], title: str, path: Path) -> None:
    """Draw the curves on white into `path`; `starts`: the step from which each later attempt resumed."""
    buffer = io.BytesIO()
    with _own_style():
        figure = _draw(metrics, starts, size=(9.0, 4.6), title=title)
        figure.savefig(buffer, format="png", dpi=160)
    with replacing(path) as stream:
        stream.write(buffer.getvalue())


def svg(
    metrics: Metrics,
    starts: Mapping[int, int],
    *,
    name: str,
    size: tuple[float, float],
    draw: Callable[..., Figure] | None = None,
) -> str:
    """Return the picture as SVG for a page, in the colours of the page.

    Args:
        metrics: of the run.
        starts: the step from which each later attempt resumed.
        name: makes the ids of the picture unique.
        size: width and height in inches.
        draw: draws the picture; None: the loss.
    """
    return figure_svg(name, lambda: (draw or _draw)(metrics, starts, size=size, title=""))


def figure_svg(name: str, draw: Callable[[], Figure]) -> str:
    """Return the figure that `draw` makes as SVG for a page; `name` makes its ids unique."""
    buffer = io.StringIO()
    with _own_style(salt=name):
        draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(buffer.getvalue(), name)


@contextmanager
def _own_style(salt: str = "") -> Iterator[None]:
    """Use matplotlib's defaults: a person's matplotlibrc may ask for LaTeX or a dark page."""
    try:
        import matplotlib
    except ImportError as error:
        raise SlurmddpError(
            "The report needs matplotlib, which is not installed.",
            hint="Install it with `pip install 'slurmddp[report]'`.",
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.fonttype"] = "none"
        matplotlib.rcParams["svg.hashsalt"] = salt  # The same run gives the same page, byte for byte.
        yield


def thin(curve: Curve, most: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """Return the finite points, averaged in equal groups if there are more than `most`."""
    points = [
        (step, value) for step, value in zip(curve.steps, curve.values, strict=True) if math.isfinite(value)
    ]
    group = max(1, math.ceil(len(points) / most))
    groups = [points[at : at + group] for at in range(0, len(points), group)]
    xs = [sum(step for step, _ in some) / len(some) for some in groups]
    return xs, [sum(value for _, value in some) / len(some) for some in groups]


def new_figure(size: tuple[float, float]) -> Figure:
    """Return an empty figure of this width and height in inches."""
    # The Figure class alone: pyplot would choose a backend for the whole process and keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw(metrics: Metrics, starts: Mapping[int, int], *, size: tuple[float, float], title: str) -> Figure:
    figure = new_figure(size)
    axes = figure.add_subplot()
    for curve, colour, label in (
        (metrics.train, "train", "training"),
        (metrics.held_out, "held", "held-out"),
    ):
        xs, ys = thin(curve)
        if xs:
            # A single point has no line. Marks show where the held-out loss was measured.
            marker = "o" if len(xs) == 1 or (colour == "held" and len(xs) <= 60) else ""
            line = axes.plot(xs, ys, color=COLOURS[colour], label=label, linewidth=1.8)[0]
            # A mark at step 0 reaches beyond the axes.
            line.set(marker=marker, markersize=4.5, clip_on=not marker)
    axes.set_yscale("log" if _spans_decades((metrics.train, metrics.held_out)) else "linear")
    _mark_attempts(axes, starts)
    _dress(axes, title, "loss")
    axes.legend(frameon=False, labelcolor=COLOURS["ink"], loc="best", fontsize=9.5)
    return figure


def draw_optimizer(
    metrics: Metrics, starts: Mapping[int, int], *, size: tuple[float, float], title: str
) -> Figure:
    """Draw learning rate and gradient norm, each on axes of its own: side by side if the picture is wide."""
    figure = new_figure(size)
    known = [(curve, label) for curve, label in optimizer_curves(metrics) if thin(curve)[0]]
    shape = (1, len(known)) if size[0] > 2 * size[1] else (len(known), 1)
    for number, (curve, label) in enumerate(known, 1):
        axes = figure.add_subplot(*shape, number)
        xs, ys = thin(curve)
        axes.plot(xs, ys, color=COLOURS["train"], linewidth=1.8, marker="o" if len(xs) == 1 else "")
        axes.set_yscale("log" if _spans_decades([curve]) else "linear")
        _mark_attempts(axes, starts, named=False)
        _dress(axes, title, label)
    return figure


def optimizer_curves(metrics: Metrics) -> tuple[tuple[Curve, str], ...]:
    """Return the curves of `draw_optimizer` with their labels."""
    return (metrics.lr, "learning rate"), (metrics.grad_norm, "gradient norm")


def _spans_decades(curves: Sequence[Curve]) -> bool:
    """Return whether a linear axis would flatten the end of the curves."""
    values = [value for curve in curves for value in thin(curve)[1]]
    return min(values) > 0 and max(values) > 50 * min(values)


def _mark_attempts(axes: Axes, starts: Mapping[int, int], *, named: bool = True) -> None:
    for attempt, step in starts.items():
        axes.axvline(step, color=COLOURS["muted"], linewidth=0.9, linestyle=(0, (3, 3)), zorder=2)
        if named and len(starts) <= 8:
            axes.annotate(
                f"attempt {attempt}",
                (step, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, -3),
                textcoords="offset points",
                rotation=90,
                va="top",
                fontsize=8,
                color=COLOURS["muted"],
            )


def _dress(axes: Axes, title: str, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    locator = MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1)
    axes.xaxis.set_major_locator(locator)
    axes.margins(x=0.015)
    axes.set_xlim(left=0)
    plain_axes(axes, "step", label, title)


def plain_axes(axes: Axes, across: str, up: str, title: str = "") -> None:
    """Give axes the labels, grid and colours of the pictures on a page."""
    axes.set_xlabel(across, color=COLOURS["muted"])
    axes.set_ylabel(up, color=COLOURS["muted"])
    axes.grid(color=COLOURS["line"], linewidth=0.8, zorder=0)
    axes.tick_params(colors=COLOURS["muted"], length=0, labelsize=9, which="both")
    for side in axes.spines.values():
        side.set_visible(False)
    if title:
        # A dollar sign in a name is a dollar sign, not the beginning of a formula.
        axes.set_title(title, loc="left", color=COLOURS["ink"], fontweight="bold", parse_math=False)


def _for_page(text: str, name: str) -> str:
    """Return matplotlib's SVG without its XML head, with unique ids and the colours and font of the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for role, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{role})")
    return re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1; font-family: inherit", text)
