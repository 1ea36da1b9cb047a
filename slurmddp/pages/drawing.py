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
"""Colours for a white background. On a page, the CSS variable with the same name replaces each colour."""
LINES = ("#c2570c", "#2f6fde", "#2a9d6f", "#a855c7", "#c9a227", "#d6457b", "#4fa3b8")
"""Colours of lines that readers can distinguish on a white page and on a dark page."""


def picture(
    name: str, draw: Callable[[Size], Figure], *, wide: Size = (9.2, 3.9), narrow: Size = (4.6, 3.9)
) -> dict[str, str]:
    """Draw a figure twice, for a wide and for a narrow window, and return both as SVG for a page.

    Args:
        name: prefix that makes the ids of the picture unique on its page.
        draw: returns the figure in a given size.
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
        draw: called without arguments, returns the figure.

    Raises:
        SlurmddpError: matplotlib is missing.
    """
    buffer = io.StringIO()
    with _default_style(salt=name):
        draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})

    return _for_page(buffer.getvalue(), name)


def write_png(path: Path, draw: Callable[[], Figure]) -> None:
    """Write a figure with a white background as a PNG file.

    Raises:
        SlurmddpError: matplotlib is missing.
    """
    buffer = io.BytesIO()
    with _default_style():
        draw().savefig(buffer, format="png", dpi=160)

    with replacing(path) as stream:
        stream.write(buffer.getvalue())


@contextmanager
def _default_style(salt: str = "") -> Iterator[None]:
    """Set matplotlib's default style during the block.

    A user's matplotlibrc could require LaTeX or a dark background.

    Args:
        salt: matplotlib derives the ids in an SVG from it (`svg.hashsalt`).

    Raises:
        SlurmddpError: matplotlib is missing.
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
        # Without a salt matplotlib chooses random ids, but the same run has to give the same SVG bytes.
        matplotlib.rcParams["svg.hashsalt"] = salt
        yield


def is_wide(size: Size) -> bool:
    """Return whether a picture is wider than 6 inches, so that panels fit side by side."""
    return size[0] > 6


def new_figure(size: Size, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return an empty figure and the axes of its panels.

    The panels are side by side if the figure is wide (`is_wide`), else one below another.
    """
    # The figure is made without pyplot, which would choose a backend for the whole process and keep every
    # figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    shape = (1, panels) if is_wide(size) else (panels, 1)

    return figure, [figure.add_subplot(*shape, number) for number in range(1, panels + 1)]


def label_axes(axes: Axes, across: str, up: str, title: str = "") -> None:
    """Set labels, title, grid and colours of axes, and hide their frame.

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
        # A title may contain a name with dollar signs, which matplotlib would read as a formula.
        axes.set_title(title, loc="left", color=COLOURS["ink"], fontweight="bold", parse_math=False)


def add_legend(owner: Axes | Figure, **where: Any) -> None:
    """Add a legend without a frame to axes or to a whole figure.

    Args:
        owner: the axes or the figure.
        where: further arguments of matplotlib's `legend`, such as `loc`.
    """
    owner.legend(frameon=False, labelcolor=COLOURS["ink"], fontsize=9, **where)


def _for_page(text: str, name: str) -> str:
    """Convert matplotlib's SVG for use inside a page.

    XML head, metadata, width and height are removed, ids get the prefix `name`, colours become CSS variables,
    and the font becomes that of the page.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for role, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{role})")

    return re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1; font-family: inherit", text)
