"""Draw the curves of a run over its steps: the loss, and the optimizer's learning rate and gradient norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slurmddp.pages.drawing import COLOURS, Size, add_legend, label_axes, new_figure
from slurmddp.runs.status.metrics import Curve, Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 800
"""Largest number of points of a curve: a screen can't show more, and more points make the page heavy."""


def has_points(*curves: Curve) -> bool:
    """Return whether any of the curves has a finite value, so that there is something to draw."""
    return any(math.isfinite(value) for curve in curves for value in curve.values)


def thin(curve: Curve, max_points: int = _MOST_POINTS) -> Curve:
    """Return the finite points of a curve.

    If there are more than `max_points`, neighbouring points are averaged in groups of equal size.
    """
    pairs = zip(curve.steps, curve.values, strict=True)
    points = [(step, value) for step, value in pairs if math.isfinite(value)]

    size = max(1, math.ceil(len(points) / max_points))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return Curve(
        steps=tuple(round(sum(step for step, _ in group) / len(group)) for group in groups),
        values=tuple(sum(value for _, value in group) / len(group) for group in groups),
    )


def draw_loss(
    train: Curve, held_out: Curve, starts: Mapping[int, int], size: Size, title: str = ""
) -> Figure:
    """Return a figure with the training loss and the held-out loss over the steps.

    Args:
        train: the training loss.
        held_out: the held-out loss.
        starts: by the number of an attempt, the step from which it resumed; drawn as vertical lines.
        size: the size of the figure.
        title: the title above the axes.
    """
    figure, (axes,) = new_figure(size)

    for curve, colour, label in (
        (train, "train", "training"),
        (held_out, "held", "held-out"),
    ):
        points = thin(curve)
        if len(points):
            # A curve with a single point has no line, so the point needs a marker. On the held-out curve, up
            # to 60 markers show where the loss was measured.
            marker = "o" if len(points) == 1 or (colour == "held" and len(points) <= 60) else ""
            (line,) = axes.plot(points.steps, points.values, color=COLOURS[colour], label=label)
            # Markers are not clipped: half of a marker at step 0 is outside the axes.
            line.set(linewidth=1.8, marker=marker, markersize=4.5, clip_on=not marker)

    _set_axes(axes, starts, "loss", title, train, held_out)
    add_legend(axes, loc="best")
    return figure


def draw_optimizer(metrics: Metrics, starts: Mapping[int, int], size: Size) -> Figure:
    """Return a figure with the learning rate and the gradient norm over the steps, each on its own axes."""
    curves = [(curve, label) for curve, label in optimizer_curves(metrics) if has_points(curve)]
    figure, panels = new_figure(size, len(curves))

    for axes, (curve, label) in zip(panels, curves, strict=True):
        points = thin(curve)
        marker = "o" if len(points) == 1 else ""
        axes.plot(points.steps, points.values, color=COLOURS["train"], linewidth=1.8, marker=marker)
        _set_axes(axes, starts, label, "", curve)
    return figure


def optimizer_curves(metrics: Metrics) -> tuple[tuple[Curve, str], ...]:
    """Return the curves that `draw_optimizer` draws, each with the label of its axis."""
    return (metrics.lr, "learning rate"), (metrics.grad_norm, "gradient norm")


def _set_axes(axes: Axes, starts: Mapping[int, int], label: str, title: str, *curves: Curve) -> None:
    """Set scale, ticks, limits and labels of the axes, and draw a vertical line at the start of each attempt.

    Args:
        axes: the axes; the curves are already drawn.
        starts: by the number of an attempt, the step from which it resumed.
        label: the label of the vertical axis.
        title: the title above the axes.
        curves: the drawn curves, whose values decide about a logarithmic scale.
    """
    # Imported here, because Matplotlib is an optional dependency.
    from matplotlib.ticker import MaxNLocator

    for attempt, step in starts.items():
        axes.axvline(step, color=COLOURS["muted"], linewidth=0.9, linestyle=(0, (3, 3)), zorder=2)
        if label == "loss" and len(starts) <= 8:
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

    # The scale is logarithmic if the largest value is more than 50 times the smallest: a linear axis would
    # flatten the end of such a curve.
    values = [value for curve in curves for value in thin(curve).values]
    if min(values) > 0 and max(values) > 50 * min(values):
        axes.set_yscale("log")

    locator = MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1)
    axes.xaxis.set_major_locator(locator)
    axes.margins(x=0.015)
    axes.set_xlim(left=0)
    label_axes(axes, "step", label, title)
