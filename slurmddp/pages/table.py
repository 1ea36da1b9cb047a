"""Tables of a page, made of columns that format their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Cell:
    """A table cell with its own colour, link or badge."""

    text: str
    tone: str = ""
    """CSS class for the colour of the cell; empty: the colour of the table."""
    link: str = ""
    """Address to which `text` links; empty: none."""
    mark: str = ""
    """Text that is shown as a badge after `text`; empty: none."""


@dataclass(frozen=True)
class Column:
    """A table column: a label, and a value for each row. None and an empty text are shown as `-`."""

    label: str
    values: Sequence[Any]
    """The value of each row: a plain value or a `Cell`."""
    show: Callable[[Any], str] = str
    """A function that returns the text of a plain value."""
    kind: Literal["text", "number", "prose"] = "text"
    """The layout: numbers are aligned right; prose gets the width that the other columns don't need."""

    @property
    def cells(self) -> list[Cell]:
        """The cells of the column, with plain values formatted by `show`."""
        return [value if isinstance(value, Cell) else Cell(self._text(value)) for value in self.values]

    def _text(self, value: Any) -> str:
        if value is None or value == "":
            return "-"
        return self.show(value)


@dataclass(frozen=True)
class Table:
    """A table of a page: columns with equally many values."""

    columns: Sequence[Column]
    best: int | None = None
    """Index of the row to emphasize; None: no row."""

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """The rows of the table, each with a cell for every column."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


def table(*columns: Column, best: int | None = None) -> Table:
    """Return a table of the given columns, without columns that are empty in all rows.

    Args:
        columns: the columns.
        best: index of the row to emphasize; None: no row.
    """
    kept = [column for column in columns if any(cell.text != "-" for cell in column.cells)]
    return Table(kept, best)
