"""The result file of a benchmark, and the comparison of two results that were measured alike."""

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
"""The columns that tell the rows of a table apart."""
_PLACE = ("hosts",)
"""Topology that may differ between comparable results."""
_LATENCY_FACTOR = 5
"""A link with so many times the shortest latency is slow."""
_CLOCK_S = 0.1
"""Seconds by which clocks may differ: logs of two nodes are then still in order."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measured tables of one benchmark with all that they depend on."""

    settings: Mapping[str, Any]
    """The fields of `Settings`."""
    topology: Mapping[str, Any]
    """Ranks, nodes, hosts, cores per node, GPU names, device and backend."""
    versions: Mapping[str, str]
    tables: Mapping[str, Sequence[Row]]
    model: Mapping[str, Any] = field(default_factory=dict)
    """The fitted cost model; empty without one."""
    started: str = ""
    """Date and time of the measurement in UTC."""
    format: int = FORMAT

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        write_atomic(path, json.dumps(asdict(self), indent=1) + "\n")


def read(path: Path) -> Result:
    """Read a result file, or the one in a run folder.

    Raises:
        ConfigError: there is no such file, or it is not a result of a benchmark.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ConfigError(
                f"{file} has format {found['format']}; this slurmddp reads format {FORMAT}.",
                hint="Measure again.",
            )
        return Result(**found)
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


def unlike(one: Result, other: Result) -> dict[str, tuple[Any, Any]]:
    """Return each setting, and each fact of the topology but host names, that differs, with both values."""
    return {
        name: (before.get(name), after.get(name))
        for before, after in ((one.settings, other.settings), (one.topology, other.topology))
        for name in {**before, **after}
        if name not in _PLACE and before.get(name) != after.get(name)
    }


def compare(one: Result, other: Result) -> dict[str, list[dict[str, Any]]]:
    """Return each row of the first result with its time, the time in the second result, and their ratio.

    Raises:
        MismatchError: the results were not measured with equal settings on equal topologies.
    """
    if different := unlike(one, other):
        told = "; ".join(f"{name}: {before} and {after}" for name, (before, after) in different.items())
        raise MismatchError(
            f"The two results can't be compared, because they differ in {told}.",
            hint="Measure again with equal settings and equally many ranks and nodes.",
        )
    found: dict[str, list[dict[str, Any]]] = {}
    for table, keys in KEYS.items():
        after = {tuple(row.get(key) for key in keys): row for row in other.tables.get(table, ())}
        for row in one.tables.get(table, ()):
            key = tuple(row.get(name) for name in keys)
            before_s, after_s = row.get("median_s"), after.get(key, {}).get("median_s")
            if before_s and after_s:
                times = {"first_s": before_s, "second_s": after_s, "ratio": after_s / before_s}
                found.setdefault(table, []).append({**dict(zip(keys, key, strict=True)), **times})
    return found


def slow_parts(result: Result, factor: float = 2.0) -> list[str]:
    """Return a sentence for each slow node or link of `bench cluster`.

    A disk or link is slow if it has less than 1/`factor` of the best bandwidth, or a link five times the
    shortest latency. The shortest exchange of a link counts, because busy processors delay the others. A node
    is named in place of its links if most of them are slow.

    Args:
        result: of `bench cluster`.
        factor: how many times worse than the best is slow.
    """
    nodes, links = result.tables.get("nodes", ()), result.tables.get("links", ())
    fastest = max((row["disk_bytes_per_s"] for row in nodes), default=0)
    told = [
        f"{row['node']} writes to the run folder at {row['disk_bytes_per_s'] / fastest:.0%} of the "
        "best node's bandwidth."
        for row in nodes
        if row["disk_bytes_per_s"] * factor < fastest
    ]
    told += [
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
    return told + _name_links(slow, links, best)


def _name_links(slow: Sequence[Row], links: Sequence[Row], best: float) -> list[str]:
    """Name nodes most of whose links are slow, and then the other slow links."""
    names = dict.fromkeys(name for row in slow for name in (row["from"], row["to"]))

    def share(name: str) -> float:
        own = [row for row in links if name in (row["from"], row["to"])]
        return sum(row in slow for row in own) / len(own) if len(own) > 1 else 0.0

    bad = [name for name in names if share(name) > 0.5]
    told = [f"{name} is slow: {share(name):.0%} of its links are." for name in bad]
    return told + [
        f"The link from {row['from']} to {row['to']} has {row['bytes_per_s'] / best:.0%} of the best "
        f"bandwidth, and a latency of {row['shortest_s'] * 1e6:.0f} us."
        for row in slow
        if row["from"] not in bad and row["to"] not in bad
    ]
