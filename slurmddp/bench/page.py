"""Show a benchmark as text in a terminal, and as an HTML page that needs no network and no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from slurmddp.bench.figures import pictures
from slurmddp.bench.results import Result, Row, slow_parts
from slurmddp.bench.settings import size_label
from slurmddp.pages.page import write_page
from slurmddp.pages.table import Column, Table, table
from slurmddp.runs.text_format import BYTES, SECONDS, counted, print_table, scaled

_LABELS = {
    "median_s": "median",
    "mean_s": "mean",
    "first_s": "first",
    "second_s": "second",
    "bytes": "size",
    "bytes_per_s": "bandwidth",
    "bus_bytes_per_s": "bus bandwidth",
    "disk_bytes_per_s": "disk",
    "largest_difference": "weights differ by",
    "equals_one_process": "equal",
}
_TITLES = {
    "nodes": "Nodes",
    "links": "Links between nodes",
    "all_reduce": "All-reduce",
    "strategies": "A training step",
    "scaling": "Scaling of a training step",
}


def cell(name: str, value: Any) -> str:
    """Format a value of a table. The column's name determines the unit: `_s` seconds, `_bytes` bytes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "bytes":
        return size_label(value)
    if name.endswith("bytes_per_s"):
        return f"{scaled(value, BYTES)}/s"
    if name.endswith("_bytes") or name == "bytes_sent":
        return scaled(value, BYTES)
    if name.endswith("_s"):
        return scaled(value, SECONDS)
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def _label(name: str) -> str:
    return _LABELS.get(name) or name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def as_table(rows: Sequence[Row]) -> Table:
    """Return a table with a column for each key of the rows, with formatted values."""
    names = dict.fromkeys(name for row in rows for name in row)
    return table(*(_column(name, [row.get(name) for row in rows]) for name in names))


def _column(name: str, values: Sequence[Any]) -> Column:
    if name == "note":
        return Column(_label(name), values, kind="prose")

    is_text = any(isinstance(value, str) for value in values)
    return Column(_label(name), values, partial(cell, name), "text" if is_text else "number")


def show(result: Result, stream: TextIO) -> None:
    """Print a result to a stream: its headline, its tables with titles, and its notes."""
    print(headline(result), file=stream)
    for name, rows in result.tables.items():
        if rows:
            print(f"\n{_TITLES.get(name, name)}", file=stream)
            show_rows(rows, stream)

    for note in notes(result):
        print(f"\n{note}", file=stream)


def show_rows(rows: Sequence[Row], stream: TextIO) -> None:
    """Print the rows of one table of a result as aligned columns."""
    shown = as_table(rows)
    headers = [column.label for column in shown.columns]
    cells = [[cell.text for cell in row] for row in shown.rows]
    numbers = frozenset(column.label for column in shown.columns if column.kind == "number")
    print_table(headers, cells, stream, right=numbers, whole=True)


def headline(result: Result) -> str:
    """Return a line with the benchmark, its ranks and devices, the software versions, and date and time."""
    topology = result.topology
    ranks = counted(topology["ranks"], "rank")
    nodes = counted(topology["nodes"], "node")
    place = f"{ranks} on {nodes}, {topology['device']}, {topology['backend']}"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{result.settings['bench']}: {place}. {versions}. {result.started}"


def notes(result: Result) -> list[str]:
    """Return the sentences below the tables.

    They report the cost model, strategies that were not measured or that end with other weights than the
    training in one process, and, for `bench cluster`, slow nodes and links.
    """
    sentences = []
    if result.model:
        sentences.append(_model_note(result.model))

    for row in result.tables.get("strategies", ()):
        if row.get("note"):
            sentences.append(f"{row['strategy']} was not measured: {row['note']}")
        elif not row["equals_one_process"]:
            sentences.append(
                f"{row['strategy']} ends with other weights than the training in one process: its steps do "
                "different work."
            )

    if result.settings["bench"] == "cluster":
        slow = slow_parts(result)
        sentences += slow or ["No node and no link is slower than the others by a factor of 2."]

    return sentences


def _model_note(model: Mapping[str, Any]) -> str:
    held_out = ", ".join(map(size_label, model["held_out"]))
    return (
        f"Cost model: {model['alpha_s'] * 1e6:.3g} us per message, {model['beta_s'] * 1e9:.3g} ns per byte "
        f"sent, {model['gamma_s'] * 1e9:.3g} ns per byte added. The model predicts the sizes that were left "
        f"out of the fit ({held_out}) with a median error of {model['median_error']:.0%} and a largest error "
        f"of {model['largest_error']:.0%}."
    )


def write_bench_page(result: Result, path: Path) -> None:
    """Write a result as an HTML page.

    Raises:
        SlurmddpError: matplotlib is not installed.
    """
    write_page(
        path,
        "bench.html.j2",
        kind="Benchmark",
        name=f"slurmddp bench {result.settings['bench']}",
        headline=headline(result),
        notes=notes(result),
        pictures=pictures(result),
        tables={_TITLES.get(name, name): as_table(rows) for name, rows in result.tables.items() if rows},
        facts={**result.settings, **result.topology, **result.versions},
    )
