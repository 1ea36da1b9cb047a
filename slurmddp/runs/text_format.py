"""Format plain text for the commands: aligned tables, times and numbers; colour only on a terminal."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
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
"""Matches escape sequences and control characters, which a terminal would obey, such as colours."""
_LONG_NUMBER = re.compile(r"(?<![\w./])\d+\.\d{7,}(e[-+]?\d+)?(?![\w./])")
"""Matches a number with many decimals, as a search chooses it, but no part of a path or of a version."""


def without_control(text: str) -> str:
    """Return text without escape sequences and control characters, which could control a terminal."""
    if text.isprintable():
        return text
    return _OBEYED.sub("", text)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal, of this machine or of the laptop that started this over ssh."""
    is_tty = bool(getattr(stream, "isatty", lambda: False)())
    # The laptop sets this variable if it shows the output of a command over ssh on a terminal.
    is_far_terminal = stream is sys.stdout and os.environ.get(OVER_SSH_VARIABLE) == "terminal"
    return (is_tty or is_far_terminal) and os.environ.get("TERM") != "dumb"


def counted(number: int, thing: str) -> str:
    """Return a number with a noun, in the plural if needed: `1 rank`, `2 ranks`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return `text` with the escape sequences of a colour if `stream` is a terminal and NO_COLOR is not set.

    Args:
        text: the text to be written to `stream`.
        style: a key of `_CODES`; empty for no colour.
        stream: the stream.
    """
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
    """Print a table.

    Args:
        headers: the titles of the columns.
        rows: the cells of each row.
        stream: where the table is printed.
        right: titles of columns that are aligned on the right, such as numbers.
        styles: for each row, the colour of its second cell, as in `paint`.
        whole: whether long lines wrap on a narrow terminal; otherwise they are cut off on the right.
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
        style = "bold" if number == 0 else ""
        print(paint("  ".join(padded).rstrip(), style, stream), file=stream)


def rich_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[str] = frozenset(),
    styles: Sequence[str] = (),
) -> Table:
    """Return the table that `print_table` prints on a terminal; only its last column may be cut off."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for at, header in enumerate(headers):
        # On a narrow terminal only the last column may shrink: it holds a path, and people read or copy the
        # other columns.
        width = max(len(cell) for cell in (header, *(row[at] for row in rows)))
        if at == len(headers) - 1:
            width = 1
        table.add_column(header, no_wrap=True, min_width=width, overflow="ellipsis")
        if header in right:
            table.columns[-1].justify = "right"

    for row, style in zip_longest(rows, styles[: len(rows)], fillvalue=""):
        cells = [Text(cell) for cell in row]
        if style:
            cells[1].stylize(style.replace("grey", "bright_black"))
        table.add_row(*cells)
    return table


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: `41s`, `3m 05s`, `2h 07m`, `3d 04h`; `-` for None."""
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
    """Return seconds since the epoch as local time, such as `2026-01-31 14:05:09`; `-` for None."""
    if moment is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def percent(share: float) -> str:
    """Return a fraction from 0 to 1 as a percentage.

    Only 1 gives `100 %` and only 0 gives `0 %`; values between them are rounded to `< 1 %` to `99 %`.
    """
    if 0 < share < 0.005:
        return "< 1 %"
    if share >= 1:
        return "100 %"
    return f"{min(99, round(100 * share))} %"


def shorter(settings: str) -> str:
    """Return settings with each number of seven or more decimals rounded to four significant digits."""
    return _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.4g}", settings)


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a value in the largest unit in which it is 1 or more: 0.0123 is `12.3 ms` in `SECONDS`.

    Args:
        value: the value in the base unit.
        units: pairs of scale and name, the largest unit first. A value below all of them gets the last unit.
    """
    scale, unit = next((pair for pair in units if abs(value) >= pair[0] * (1 - 1e-9)), units[-1])
    return f"{value / scale:.3g} {unit}"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number such as a loss with `digits` decimals; `-` for None.

    Values that would show as zero, and values from 100,000 on, are in scientific notation.
    """
    if value is None:
        return "-"
    if value != 0 and not 10**-digits <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.{digits}f}"
