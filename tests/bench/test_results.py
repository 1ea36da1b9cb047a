"""Result files, the comparison of like results, and the names of slow nodes and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmddp.bench.results import compare, read, slow_parts
from slurmddp.errors import ConfigError, MismatchError
from support.runs.bench_results import TOPOLOGY, bench_result, link, node, reduction


def test_c8_a_result_survives_its_file(tmp_path: Path) -> None:
    result = bench_result("collectives")
    result.write(tmp_path / "bench.json")
    for place in (tmp_path, tmp_path / "bench.json"):
        found = read(place)
        assert found.tables == result.tables and found.topology == result.topology
        assert found.versions == result.versions and found.settings["seed"] == 0


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 1, "x": 2}', '{"format": 2}', "null"])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ConfigError, match=r"not a result|format 2"):
        read(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be read: .*No such file"):
        read(tmp_path / "none.json")


def test_c8_unlike_results_are_refused_with_each_difference() -> None:
    one = bench_result("collectives")
    other = bench_result(
        "collectives", settings={**one.settings, "seed": 3}, topology={**TOPOLOGY, "ranks": 8}
    )
    with pytest.raises(MismatchError, match=r"seed: 0 and 3; ranks: 4 and 8\."):
        compare(one, other)
    with pytest.raises(MismatchError, match="bench: collectives and scaling"):
        compare(one, bench_result("scaling"))


def test_c8_like_results_are_compared_row_by_row() -> None:
    one = bench_result("collectives")
    rows = [reduction("torch", 1000, 3e-5), reduction("tree", 1000, 1.0)]
    hosts = {**TOPOLOGY, "hosts": ["c", "d"]}
    other = bench_result("collectives", tables={"all_reduce": rows}, topology=hosts, versions={"torch": "3"})
    (row,) = compare(one, other)["all_reduce"]
    assert row == {
        "algorithm": "torch", "bytes": 1000, "first_s": 1e-5, "second_s": 3e-5, "ratio": pytest.approx(3),
    }  # fmt: skip


ALL = [("a", "b"), ("a", "c"), ("b", "c")]


@pytest.mark.parametrize(
    ("nodes", "links", "told"),
    [
        ([node("a"), node("b")], [link("a", "b")], []),
        ([node("a"), node("b", disk=4e8)], [], ["b writes to the run folder at 40%"]),
        ([node("a"), node("b", clock=-2)], [], [r"The clock of b differs by -2\.000 s"]),
        ([], [link(*pair, bandwidth=1e8 if "c" in pair else 1e9) for pair in ALL], ["c is slow: 100%"]),
        ([], [link(*pair, bandwidth=1e8 if pair == ("a", "c") else 1e9) for pair in ALL],
         ["from a to c has 10% of the best"]),
        ([], [link(*pair, latency=1e-3 if pair == ("b", "c") else 1e-5) for pair in ALL],
         ["latency of 1000 us"]),
    ],
)  # fmt: skip
def test_slow_nodes_and_links_are_named(nodes: list, links: list, told: list[str]) -> None:
    found = slow_parts(bench_result("cluster", tables={"nodes": nodes, "links": links}))
    assert len(found) == len(told)
    for sentence, expected in zip(found, told, strict=True):
        assert re.search(expected, sentence), sentence
