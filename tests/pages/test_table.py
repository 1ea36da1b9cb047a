"""The table that all pages share."""

from __future__ import annotations

from slurmddp.pages.table import Cell, Column, table


def test_columns_show_their_values_and_empty_columns_are_left_out() -> None:
    found = table(
        Column("run", [Cell("a", link="a/report.html"), "b"]),
        Column("note", ["", None]),
        Column("loss", [0.0, None], "{:.1f}".format, "number"),
        best=1,
    )
    assert [column.label for column in found.columns] == ["run", "loss"]
    assert found.rows == [(Cell("a", link="a/report.html"), Cell("0.0")), (Cell("b"), Cell("-"))]
    assert table(Column("run", [])).rows == []
