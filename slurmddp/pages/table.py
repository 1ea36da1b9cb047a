"""Tables of a page, made of columns that format their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Cell:
    """A text with its own format."""

    text: str
    tone: str = ""
    """CSS class for its colour; empty: the colour of the table."""
    link: str = ""
    """Address to which the text links; empty: none."""
    mark: str = ""
    """Text to show after it, as a badge."""


@dataclass(frozen=True)
class Column:
    """A column: a label and the values of all rows. None and an empty text are shown as `-`."""

    label: str
    values: Sequence[Any]
    """Plain values or cells."""
    show: Callable[[Any], str] = str
    """Formats a plain value."""
    kind: Literal["text", "number", "prose"] = "text"
    """Numbers are aligned right; prose gets the width that other columns leave."""

    @property
    def cells(self) -> list[Cell]:
        """The cells of the column."""
        return [value if isinstance(value, Cell) else Cell(self._text(value)) for value in self.values]

    def _text(self, value: Any) -> str:
        if value is None or value == "":
            return "-"
        return self.show(value)


@dataclass(frozen=True)
class Table:
    """A table, made of columns of the same length."""

    columns: Sequence[Column]
    best: int | None = None
    """Index of the row to emphasize; None: no row."""

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """The cells of each row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


def table(*columns: Column, best: int | None = None) -> Table:
    """Return a table without columns that are empty in all rows."""
    kept = [column for column in columns if any(cell.text != "-" for cell in column.cells)]
    return Table(kept, best)
