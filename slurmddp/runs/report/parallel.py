"""Draw runs as parallel coordinates: an axis for each setting, an axis for the result, a line for each run.

The plot is due to A. Inselberg, "The plane with parallel coordinates", The Visual Computer 1 (1985).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmddp.pages.drawing import COLOURS, Size, is_wide, new_figure
from slurmddp.runs.report.settings import as_text
from slurmddp.short_text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMED = 7
"""Values of an axis that are named one by one, at the same distance; more values lie on a scale."""
_DECADES = 20.0
"""Largest to smallest value from which an axis has a logarithmic scale."""
_LABEL_CHARS = 18
_MOST_DIGITS = 7
"""Digits of a number at an axis; fewer, but at least 3, if they tell the numbers apart."""
_PER_AXIS_INCHES = 0.95


@dataclass(frozen=True)
class Axis:
    """One axis; places run from 0 to 1, in the order of the runs."""

    label: str
    places: tuple[float, ...]
    ticks: tuple[tuple[float, str], ...]


def setting_axis(label: str, values: Sequence[Any]) -> Axis:
    """Return the axis of a setting: few values stand at equal distances, many or long numbers on a scale."""
    distinct = list({as_text(value): value for value in values}.values())
    if all(map(_is_number, distinct)):
        if len(distinct) > _MOST_NAMED or any(len(as_text(value)) > _LABEL_CHARS for value in distinct):
            return number_axis(label, values)
        distinct.sort()
    texts = [as_text(value) for value in distinct]
    at = {text: _share(number, len(texts) - 1) for number, text in enumerate(texts)}
    step = -(-len(texts) // _MOST_NAMED)  # Of many texts only some are named.
    ticks = [(at[text], shorten(text, _LABEL_CHARS)) for text in texts[::step]]
    return Axis(label, tuple(at[as_text(value)] for value in values), tuple(ticks))


def number_axis(label: str, values: Sequence[float]) -> Axis:
    """Return an axis with a scale, logarithmic if the values span decades."""
    low, high = min(values), max(values)
    is_log = low > 0 and high >= _DECADES * low
    scale = math.log if is_log else float

    def place(value: float) -> float:
        return _share(scale(value) - scale(low), scale(high) - scale(low))

    middle = math.sqrt(low * high) if is_log else (low + high) / 2
    named = list(dict.fromkeys([low, middle, high]))
    labels = [[f"{one:.{digits}g}" for one in named] for digits in range(3, _MOST_DIGITS + 1)]
    texts = next((one for one in labels if len(set(one)) == len(named)), labels[-1])
    return Axis(label, tuple(map(place, values)), tuple(zip(map(place, named), texts, strict=True)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.5


def height(axes: int) -> float:
    """Return the height in inches of the narrow picture, whose axes lie below each other."""
    return _PER_AXIS_INCHES * axes


def draw(axes: Sequence[Axis], best: int | None, size: Size) -> Figure:
    """Draw the lines; the axes stand side by side if the picture is wide, else they lie below each other.

    Args:
        axes: the settings, and the result as the last one.
        best: the index of the run to emphasize; None: no run.
        size: of the picture.
    """
    figure, (plot,) = new_figure(size)
    wide = is_wide(size)
    for run in sorted(range(len(axes[0].places)), key=lambda number: number == best):
        along, across = range(len(axes)), [axis.places[run] for axis in axes]
        xs, ys = (along, across) if wide else (across, [-one for one in along])
        is_best = run == best
        look: dict[str, Any] = {"color": COLOURS["train"], "linewidth": 1.3, "alpha": 0.5}
        look |= {"color": COLOURS["held"], "linewidth": 2.6, "alpha": 1.0} if is_best else {}
        plot.plot(xs, ys, solid_joinstyle="round", **look)
    for number, axis in enumerate(axes):
        _draw_axis(plot, axis, number, is_wide=wide)
    plot.set_axis_off()
    if wide:
        plot.set(xlim=(-0.35, len(axes) - 0.85), ylim=(-0.05, 1.16))
    else:
        plot.set(xlim=(-0.06, 1.06), ylim=(0.5 - len(axes), 0.4))
    return figure


def _draw_axis(plot: Axes, axis: Axis, number: int, *, is_wide: bool) -> None:
    muted = COLOURS["muted"]
    box = {"fc": COLOURS["card"], "ec": "none", "pad": 1.2, "alpha": 0.85}
    ends = ((number, number), (0, 1)) if is_wide else ((0, 1), (-number, -number))
    plot.plot(*ends, color=muted, linewidth=1.1, zorder=3)
    title: dict[str, Any] = {"color": COLOURS["ink"], "fontsize": 9.5, "fontweight": "bold", "zorder": 5}
    if is_wide:
        plot.text(number, 1.09, axis.label, ha="center", parse_math=False, **title)
    else:
        plot.text(0, 0.12 - number, axis.label, ha="left", bbox=box, parse_math=False, **title)
    for place, text in axis.ticks:
        mark = (number, place) if is_wide else (place, -number)
        where = (number - 0.035, place) if is_wide else (place, -number - 0.1)
        across, up = ("right", "center") if is_wide else (_side(place), "top")
        side: dict[str, Any] = {"ha": across, "va": up}
        plot.plot(*mark, marker="o", markersize=3.5, color=muted, zorder=4)
        plot.text(*where, text, color=muted, fontsize=9, bbox=box, zorder=5, parse_math=False, **side)


def _side(place: float) -> str:
    """Return the alignment with which a label below a lying axis stays inside of the picture."""
    return "left" if place < 0.1 else "right" if place > 0.9 else "center"
