"""The result file of a benchmark, and the comparison of two results with equal settings and topology."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmddp.errors import ConfigError, MismatchError, plain
from slurmddp.host.atomic_file import write_atomic

FILE_NAME = "bench.json"
FORMAT = 1
Row = Mapping[str, Any]

KEYS: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("algorithm", "bytes"),
    "strategies": ("strategy",),
    "scaling": ("scaling", "ranks"),
    "nodes": ("node",),
    "links": ("from", "to"),
}
"""The columns that identify a row, by the name of the table."""
_MAY_DIFFER = ("hosts",)
"""Keys of the topology whose values may differ between two results that are compared."""
_LATENCY_FACTOR = 5
"""A link is slow if its latency is more than this factor times the shortest latency of all links."""
_CLOCK_S = 0.1
"""Largest accepted difference of two clocks in seconds. Lines of two nodes' logs are then still in order."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measured tables of a benchmark, with the settings, topology and versions of the measurement."""

    settings: Mapping[str, Any]
    """The fields of `Settings`."""
    topology: Mapping[str, Any]
    """Ranks, nodes, hosts, cores per node, GPU names, device and backend."""
    versions: Mapping[str, str]
    tables: Mapping[str, Sequence[Row]]
    model: Mapping[str, Any] = field(default_factory=dict)
    """The fitted cost model; empty if none was fitted."""
    started: str = ""
    """Date and time of the measurement in UTC."""
    format: int = FORMAT

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        write_atomic(path, json.dumps(asdict(self), indent=1) + "\n")


def read(path: Path) -> Result:
    """Read a result from its file, or from the run folder that contains the file.

    Raises:
        ConfigError: there is no such file, or it is not a result of a benchmark.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ConfigError(
                f"{file} has format {content['format']}; this slurmddp reads format {FORMAT}.",
                hint="Run the benchmark again with this version.",
            )

        return Result(**content)
    except OSError as error:
        raise ConfigError(
            f"{file} can't be read: {plain(error)}.",
            hint="Give the file bench.json of a benchmark, or the folder of its run.",
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file} is not a result of `slurmddp bench`.",
            hint="Give the file bench.json of a benchmark, or the folder of its run.",
        ) from error


def differences(first: Result, second: Result) -> dict[str, tuple[Any, Any]]:
    """Return the settings and topology values that differ: name to (first value, second value).

    Host names may differ, and are left out.
    """
    facts = {**first.settings, **first.topology}
    other_facts = {**second.settings, **second.topology}
    return {
        name: (facts.get(name), other_facts.get(name))
        for name in {**facts, **other_facts}
        if name not in _MAY_DIFFER and facts.get(name) != other_facts.get(name)
    }


def compare(first: Result, second: Result) -> dict[str, list[dict[str, Any]]]:
    """Compare the median times of the rows that both results have.

    Returns:
        By table, a row for each compared time: the columns that identify it (see `KEYS`), `first_s`,
        `second_s`, and `ratio` = second / first.

    Raises:
        MismatchError: the results were not measured with equal settings on equal topologies.
    """
    different = differences(first, second)
    if different:
        text = "; ".join(f"{name}: {value} and {other}" for name, (value, other) in different.items())
        raise MismatchError(
            f"The two results can't be compared, because they differ in {text}.",
            hint="Run one of the benchmarks again with the settings, ranks and nodes of the other.",
        )

    compared: dict[str, list[dict[str, Any]]] = {}
    for table, columns in KEYS.items():
        second_rows = {_key(row, columns): row for row in second.tables.get(table, ())}
        for row in first.tables.get(table, ()):
            key = _key(row, columns)
            first_s = row.get("median_s")
            second_s = second_rows.get(key, {}).get("median_s")
            if first_s and second_s:
                times = {"first_s": first_s, "second_s": second_s, "ratio": second_s / first_s}
                compared.setdefault(table, []).append({**dict(zip(columns, key, strict=True)), **times})

    return compared


def _key(row: Row, columns: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in columns)


def slow_parts(result: Result, factor: float = 2.0) -> list[str]:
    """Return a sentence for each slow disk, wrong clock, slow node and slow link; empty if there is none.

    A disk is slow if it has less than 1/`factor` of the best bandwidth. A link is slow if it has less than
    1/`factor` of the best bandwidth, or over five times the shortest latency of all links. The latency of a
    link is the time of its fastest exchange, because busy processors can delay any other exchange. If over
    half of a node's links are slow, one sentence names the node instead of these links. A clock is wrong if
    it differs by more than 0.1 s from the first node's clock.

    Args:
        result: a result of `bench cluster`.
        factor: a bandwidth counts as slow if `factor` times this bandwidth is still below the best one.
    """
    nodes = result.tables.get("nodes", ())
    links = result.tables.get("links", ())

    best_disk = max((row["disk_bytes_per_s"] for row in nodes), default=0)
    sentences = [
        f"{row['node']} writes to the run folder at {row['disk_bytes_per_s'] / best_disk:.0%} of the "
        "best node's bandwidth."
        for row in nodes
        if row["disk_bytes_per_s"] * factor < best_disk
    ]
    sentences += [
        f"The clock of {row['node']} differs by {row['clock_offset_s']:+.3f} s from the first node's clock."
        for row in nodes
        if abs(row["clock_offset_s"]) > _CLOCK_S
    ]

    best = max((row["bytes_per_s"] for row in links), default=0)
    shortest = min((row["shortest_s"] for row in links), default=0)
    slow = [
        row
        for row in links
        if row["bytes_per_s"] * factor < best or row["shortest_s"] > _LATENCY_FACTOR * shortest
    ]
    return sentences + _slow_links(slow, links, best)


def _slow_links(slow: Sequence[Row], links: Sequence[Row], best: float) -> list[str]:
    """Return a sentence for each node with over half of its links slow, then for each other slow link.

    Args:
        slow: the rows of the slow links.
        links: the rows of all links.
        best: the best bandwidth of all links, in bytes per second.
    """
    names = dict.fromkeys(name for row in slow for name in (row["from"], row["to"]))

    def share(name: str) -> float:
        """Return the fraction of a node's links that are slow; 0 for a node with a single link."""
        links_of_node = [row for row in links if name in (row["from"], row["to"])]
        if len(links_of_node) < 2:
            return 0.0
        return sum(row in slow for row in links_of_node) / len(links_of_node)

    slow_nodes = [name for name in names if share(name) > 0.5]
    sentences = [f"{name} is slow: {share(name):.0%} of its links are slow." for name in slow_nodes]
    return sentences + [
        f"The link from {row['from']} to {row['to']} has {row['bytes_per_s'] / best:.0%} of the best "
        f"bandwidth, and a latency of {row['shortest_s'] * 1e6:.0f} us."
        for row in slow
        if row["from"] not in slow_nodes and row["to"] not in slow_nodes
    ]
