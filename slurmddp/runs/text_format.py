"""Plain text for the commands: aligned tables, times and numbers; colour only on a terminal."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from slurmddp.environments.names import OVER_SSH_VARIABLE

if TYPE_CHECKING:
    from rich.table import Table

_CODES = {"green": "32", "red": "31", "yellow": "33", "blue": "34", "grey": "90", "bold": "1"}

STATE_STYLES = {
    "preparing": "blue",
    "queued": "blue",
    "starting": "green",
    "running": "green",
    "stopped": "yellow",
    "finished": "green",
    "failed": "red",
    "cancelled": "grey",
    "lost": "red",
    "unknown": "yellow",
}

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))

_OBEYED = re.compile(
    r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
"""Escape sequences and control characters, from colours or binary output."""


_LONG_NUMBER = re.compile(r"(?<![\w./])\d+\.\d{7,}(e[-+]?\d+)?(?![\w./])")
"""A number as a search draws it; not a part of a path or a version."""


def without_control(text: str) -> str:
    """Return text without what a terminal would obey: another account may have written it."""
    return text if text.isprintable() else _OBEYED.sub("", text)


def is_terminal(stream: TextIO) -> bool:
    """Tell whether a person reads this stream directly."""
    is_tty = bool(getattr(stream, "isatty", lambda: False)())
    # The output of a command over ssh goes to the laptop's terminal.
    is_far_terminal = stream is sys.stdout and os.environ.get(OVER_SSH_VARIABLE) == "terminal"
    return (is_tty or is_far_terminal) and os.environ.get("TERM") != "dumb"


def counted(number: int, thing: str) -> str:
    """Say `1 rank`, `2 ranks`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def paint(text: str, style: str, stream: TextIO) -> str:
    """Colour `text` on a terminal, unless NO_COLOR is set."""
    if not style or not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    stream: TextIO,
    *,
    right: frozenset[str] = frozenset(),
    styles: Sequence[str] = (),
    whole: bool = False,
) -> None:
    """Print a table; `right` names columns of numbers, `styles` colours the second column of each row.

    A terminal that is too narrow cuts it off on the right; a table that stays `whole` wraps its lines there.
    """
    rows = [[without_control(cell) for cell in row] for row in rows]
    if is_terminal(stream) and not whole:
        from rich.console import Console

        Console(file=stream, force_terminal=True).print(rich_table(headers, rows, right=right, styles=styles))
        return
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    for number, row in enumerate(cells):
        padded = (
            cell.rjust(width) if header in right else cell.ljust(width)
            for cell, width, header in zip(row, widths, headers, strict=True)
        )
        print(paint("  ".join(padded).rstrip(), "" if number else "bold", stream), file=stream)


def rich_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[str] = frozenset(),
    styles: Sequence[str] = (),
) -> Table:
    """Return the table of `print_table` for a terminal, cut off on the right where that is too narrow."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for at, header in enumerate(headers):
        # Only the last column, a path, gives way on a narrow terminal: all others are read or copied.
        is_last = at == len(headers) - 1
        width = 1 if is_last else max(len(cell) for cell in (header, *(row[at] for row in rows)))
        table.add_column(header, no_wrap=True, min_width=width, overflow="ellipsis")
        table.columns[-1].justify = "right" if header in right else "left"
    for number, row in enumerate(rows):
        colour = (styles[number] if number < len(styles) else "").replace("grey", "bright_black")
        cells = [Text(cell, style=colour if at == 1 else "") for at, cell in enumerate(row)]
        table.add_row(*cells)
    return table


def duration(seconds: float | None) -> str:
    """Say a length of time in the two largest units that matter: `41s`, `3m 05s`, `2h 07m`, `3d 04h`."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def local_time(moment: float | None) -> str:
    """Say a moment in this machine's time zone."""
    return "-" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def percent(share: float) -> str:
    """Say a share of a whole; only all of it is `100 %`, and only nothing `0 %`."""
    if 0 < share < 0.005:
        return "< 1 %"
    return f"{100 if share >= 1 else min(99, round(100 * share))} %"


def shorter(settings: str) -> str:
    """Return settings with four significant digits of each number that has seven decimals or more."""
    return _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.4g}", settings)


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a value in the largest of `units` in which it is 1 or more: `12.3 ms` in `SECONDS`."""
    scale, unit = next((pair for pair in units if abs(value) >= pair[0] * (1 - 1e-9)), units[-1])
    return f"{value / scale:.3g} {unit}"


def number(value: float | None, digits: int = 4) -> str:
    """Say a loss: four decimals, or scientific where those would show nothing."""
    if value is None:
        return "-"
    extreme = value != 0 and not 10**-digits <= abs(value) < 1e5
    return f"{value:.2e}" if extreme else f"{value:.{digits}f}"
