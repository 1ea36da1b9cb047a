"""A table of a page, made of columns that know how their values are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Cell:
    """A text with a look of its own; `tone` colours it, `mark` stands behind it."""

    text: str
    tone: str = ""
    link: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Column:
    """The values of one column, from the first row to the last; None and an empty text are shown as `-`."""

    label: str
    values: Sequence[Any]
    """Plain values, or cells."""
    show: Callable[[Any], str] = str
    """Returns a plain value as text."""
    kind: Literal["text", "number", "prose"] = "text"
    """Numbers are aligned at the right; prose takes the width that other columns leave."""

    @property
    def cells(self) -> list[Cell]:
        return [value if isinstance(value, Cell) else Cell(self._text(value)) for value in self.values]

    def _text(self, value: Any) -> str:
        return "-" if value is None or value == "" else self.show(value)


@dataclass(frozen=True)
class Table:
    """The columns of a table that have a value, and its rows."""

    columns: Sequence[Column]
    best: int | None = None
    """The row to emphasize, from 0."""

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        return list(zip(*(column.cells for column in self.columns), strict=True))


def table(*columns: Column, best: int | None = None) -> Table:
    """Return a table without the columns that are empty in all rows."""
    kept = [column for column in columns if any(cell.text != "-" for cell in column.cells)]
    return Table(kept, best)
