"""Draw runs as parallel coordinates: an axis for each setting, an axis for the result, a line for each run.

Source of the plot: A. Inselberg, "The plane with parallel coordinates", The Visual Computer 1 (1985).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmddp.pages.drawing import COLOURS, Size, is_wide, new_figure
from slurmddp.runs.report.differing_settings import as_text
from slurmddp.short_text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMED = 7
"""Largest number of values that are drawn at equal distances, each with a label; more numbers get a scale."""
_DECADES = 20.0
"""Ratio of the largest to the smallest value from which an axis has a logarithmic scale."""
_LABEL_CHARS = 18
_MOST_DIGITS = 7
"""Largest number of digits of a label. A label has 3 digits, or as many as make all labels different."""
_PER_AXIS_INCHES = 0.95


@dataclass(frozen=True)
class Axis:
    """An axis of a parallel coordinates plot, with the position of each run on it."""

    label: str
    places: tuple[float, ...]
    """The place of each run on the axis, from 0 to 1."""
    ticks: tuple[tuple[float, str], ...]
    """Places on the axis and their labels."""


def setting_axis(label: str, values: Sequence[Any]) -> Axis:
    """Return the axis of a setting.

    Numbers are on a scale if there are more than `_MOST_NAMED` of them, or if one is longer than
    `_LABEL_CHARS`. All other values are at equal distances.

    Args:
        label: the title of the axis.
        values: the value of each run.
    """
    distinct = list({as_text(value): value for value in values}.values())
    if all(map(_is_number, distinct)):
        has_long = any(len(as_text(value)) > _LABEL_CHARS for value in distinct)
        if len(distinct) > _MOST_NAMED or has_long:
            return number_axis(label, values)
        distinct.sort()

    texts = [as_text(value) for value in distinct]
    places = {text: _share(number, len(texts) - 1) for number, text in enumerate(texts)}
    # At most `_MOST_NAMED` of the texts get a label.
    step = math.ceil(len(texts) / _MOST_NAMED)
    ticks = [(places[text], shorten(text, _LABEL_CHARS)) for text in texts[::step]]
    return Axis(label, tuple(places[as_text(value)] for value in values), tuple(ticks))


def number_axis(label: str, values: Sequence[float]) -> Axis:
    """Return an axis with a scale, logarithmic if the largest value is `_DECADES` times the smallest or more.

    Args:
        label: the title of the axis.
        values: the value of each run.
    """
    low = min(values)
    high = max(values)
    scale: Callable[[float], float] = float
    middle = (low + high) / 2
    if low > 0 and high >= _DECADES * low:
        scale = math.log
        middle = math.sqrt(low * high)

    def place(value: float) -> float:
        return _share(scale(value) - scale(low), scale(high) - scale(low))

    marked = list(dict.fromkeys([low, middle, high]))
    for digits in range(3, _MOST_DIGITS + 1):
        labels = [f"{value:.{digits}g}" for value in marked]
        if len(set(labels)) == len(marked):
            break
    return Axis(label, tuple(map(place, values)), tuple(zip(map(place, marked), labels, strict=True)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.5


def height(axes: int) -> float:
    """Return the height in inches of a narrow figure with `axes` horizontal axes, one below the other."""
    return _PER_AXIS_INCHES * axes


def draw(axes: Sequence[Axis], best: int | None, size: Size) -> Figure:
    """Return a figure with a line for each run, which crosses each axis at the run's value.

    In a wide figure the axes are vertical and side by side, in a narrow one horizontal and below each other.

    Args:
        axes: the axes of the settings, followed by the axis of the result.
        best: the index of the run to emphasize; None for no run.
        size: the size of the figure.
    """
    figure, (plot,) = new_figure(size)
    wide = is_wide(size)

    # The line of the best run is drawn last, above the other lines.
    for run in sorted(range(len(axes[0].places)), key=lambda number: number == best):
        places = [axis.places[run] for axis in axes]
        look: dict[str, Any] = {"color": COLOURS["train"], "linewidth": 1.3, "alpha": 0.5}
        if run == best:
            look = {"color": COLOURS["held"], "linewidth": 2.6, "alpha": 1.0}

        if wide:
            plot.plot(range(len(axes)), places, solid_joinstyle="round", **look)
        else:
            plot.plot(places, [-number for number in range(len(axes))], solid_joinstyle="round", **look)

    for number, axis in enumerate(axes):
        if wide:
            _draw_standing_axis(plot, axis, number)
        else:
            _draw_lying_axis(plot, axis, -number)
    plot.set_axis_off()
    if wide:
        plot.set(xlim=(-0.35, len(axes) - 0.85), ylim=(-0.05, 1.16))
    else:
        plot.set(xlim=(-0.06, 1.06), ylim=(0.5 - len(axes), 0.4))
    return figure


def _draw_standing_axis(plot: Axes, axis: Axis, x: int) -> None:
    """Draw a vertical axis at the position `x`, with its title above and its labels on the left."""
    plot.plot((x, x), (0, 1), **_line_style())
    plot.text(x, 1.09, axis.label, ha="center", **_title_style())
    for place, text in axis.ticks:
        plot.plot(x, place, **_tick_style())
        plot.text(x - 0.035, place, text, ha="right", va="center", bbox=_box(), **_label_style())


def _draw_lying_axis(plot: Axes, axis: Axis, y: int) -> None:
    """Draw a horizontal axis at the position `y`, with its title above and its labels below."""
    plot.plot((0, 1), (y, y), **_line_style())
    plot.text(0, y + 0.12, axis.label, ha="left", bbox=_box(), **_title_style())
    for place, text in axis.ticks:
        plot.plot(place, y, **_tick_style())
        plot.text(place, y - 0.1, text, ha=_side(place), va="top", bbox=_box(), **_label_style())


def _line_style() -> dict[str, Any]:
    return {"color": COLOURS["muted"], "linewidth": 1.1, "zorder": 3}


def _tick_style() -> dict[str, Any]:
    return {"color": COLOURS["muted"], "marker": "o", "markersize": 3.5, "zorder": 4}


def _title_style() -> dict[str, Any]:
    # `parse_math` is off, because a `$` in the name of a setting does not begin a formula.
    return {
        "color": COLOURS["ink"],
        "fontsize": 9.5,
        "fontweight": "bold",
        "zorder": 5,
        "parse_math": False,
    }


def _label_style() -> dict[str, Any]:
    return {"color": COLOURS["muted"], "fontsize": 9, "zorder": 5, "parse_math": False}


def _box() -> dict[str, Any]:
    """Return the style of the background of a text, which keeps the text readable above lines."""
    return {"fc": COLOURS["card"], "ec": "none", "pad": 1.2, "alpha": 0.85}


def _side(place: float) -> str:
    """Return the horizontal alignment with which a label at `place` (0 to 1) stays inside the figure."""
    if place < 0.1:
        return "left"
    if place > 0.9:
        return "right"
    return "center"
