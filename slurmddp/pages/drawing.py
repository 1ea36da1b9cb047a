"""Draw pictures in a common style, as SVG with the colours and the font of the page, or as PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmddp.errors import SlurmddpError
from slurmddp.host.atomic_file import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Size = tuple[float, float]
"""Width and height of a picture in inches."""

COLOURS = {
    "train": "#2f6fde",
    "held": "#c2570c",
    "ink": "#1c2024",
    "muted": "#60646d",
    "line": "#e3e5ea",
    "card": "#fefefe",
}
"""Colours on white. On a page, each is replaced by the CSS variable of its name."""
LINES = ("#c2570c", "#2f6fde", "#2a9d6f", "#a855c7", "#c9a227", "#d6457b", "#4fa3b8")
"""Colours of lines that readers can distinguish on a white page and on a dark page."""


def picture(
    name: str, draw: Callable[[Size], Figure], *, wide: Size = (9.2, 3.9), narrow: Size = (4.6, 3.9)
) -> dict[str, str]:
    """Return a picture as SVG for a page, drawn for a wide and for a narrow window.

    Args:
        name: prefix that makes the ids of the picture unique on its page.
        draw: draws the picture in a given size.
        wide: size for a wide window, in inches.
        narrow: size for a phone, in inches.

    Returns:
        The SVG texts, with the keys "wide" and "narrow".

    Raises:
        SlurmddpError: matplotlib is missing.
    """
    return {
        "wide": figure_svg(f"{name}-wide", lambda: draw(wide)),
        "narrow": figure_svg(f"{name}-narrow", lambda: draw(narrow)),
    }


def figure_svg(name: str, draw: Callable[[], Figure]) -> str:
    """Return a figure as SVG for a page.

    Args:
        name: prefix that makes the ids of the figure unique on its page.
        draw: returns the figure.

    Raises:
        SlurmddpError: matplotlib is missing.
    """
    buffer = io.StringIO()
    with _default_style(salt=name):
        draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})

    return _for_page(buffer.getvalue(), name)


def write_png(path: Path, draw: Callable[[], Figure]) -> None:
    """Write a figure on white as a PNG file; raise SlurmddpError if matplotlib is missing."""
    buffer = io.BytesIO()
    with _default_style():
        draw().savefig(buffer, format="png", dpi=160)

    with replacing(path) as stream:
        stream.write(buffer.getvalue())


@contextmanager
def _default_style(salt: str = "") -> Iterator[None]:
    """Use matplotlib's defaults, because a user's matplotlibrc may require LaTeX or a dark background.

    Args:
        salt: seed of the ids in an SVG.
    """
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
        # Ids must not be random: the same run has to produce the same page, byte for byte.
        matplotlib.rcParams["svg.hashsalt"] = salt
        yield


def is_wide(size: Size) -> bool:
    """Return whether a picture has room for panels side by side."""
    return size[0] > 6


def new_figure(size: Size, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure and the axes of its panels, side by side if it is wide, else one below another."""
    # pyplot would choose a backend for the whole process and keep every figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    shape = (1, panels) if is_wide(size) else (panels, 1)

    return figure, [figure.add_subplot(*shape, number) for number in range(1, panels + 1)]


def label_axes(axes: Axes, across: str, up: str, title: str = "") -> None:
    """Set labels, grid and colours of axes.

    Args:
        axes: the axes.
        across: label of the x axis.
        up: label of the y axis.
        title: title; empty: none.
    """
    axes.set_xlabel(across, color=COLOURS["muted"])
    axes.set_ylabel(up, color=COLOURS["muted"])
    axes.grid(color=COLOURS["line"], linewidth=0.8, zorder=0)
    axes.tick_params(colors=COLOURS["muted"], length=0, labelsize=9, which="both")
    for side in axes.spines.values():
        side.set_visible(False)

    if title:
        # A dollar sign in a name must not begin a formula.
        axes.set_title(title, loc="left", color=COLOURS["ink"], fontweight="bold", parse_math=False)


def add_legend(owner: Axes | Figure, **where: Any) -> None:
    """Add a legend without a frame to axes or to a whole figure."""
    owner.legend(frameon=False, labelcolor=COLOURS["ink"], fontsize=9, **where)


def _for_page(text: str, name: str) -> str:
    """Return matplotlib's SVG without XML head and size, with unique ids and the page's colours and font."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for role, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{role})")

    return re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1; font-family: inherit", text)
