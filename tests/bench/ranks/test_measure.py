"""All benchmarks on two ranks, in one start: counts, correctness, and the columns of each table."""

from __future__ import annotations

from typing import Any

import pytest

from slurmddp.bench.ranks.measure import measure
from slurmddp.bench.ranks.scaling import efficiency, numbers
from slurmddp.bench.settings import Settings
from slurmddp.collectives import ALGORITHMS
from slurmddp.collectives.cost_model import WORK
from slurmddp.errors import ConfigError
from slurmddp.strategies import STRATEGIES
from slurmddp.training.distributon import Distributon
from support.distributed import bench_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.fixture(scope="module")
def results(rank_server: None) -> dict[str, Any]:
    return run_ranks(bench_jobs.results, 2)[0]


def test_c7_c9_the_result_of_collectives_has_counts_and_a_model_with_its_error(results) -> None:
    found = results["collectives"]
    rows = {(row["algorithm"], row["bytes"]): row for row in found["tables"]["all_reduce"]}
    assert set(rows) == {(name, size) for name in ("torch", *ALGORITHMS) for size in (4_000, 12_000, 40_000)}
    for (name, size), row in rows.items():
        assert row["largest_error"] < 1e-5 and row["median_s"] > 0
        if name != "torch":
            assert row["bytes_sent"] <= WORK[name](2, size).sent
    assert rows["ring", 40_000]["messages"] == 2 and rows["ring", 40_000]["bytes_sent"] == 40_000
    assert found["model"]["held_out"] == [12_000]
    print(f"error on the held-out size: {found['model']['median_error']:.0%}")
    assert 0 <= found["model"]["median_error"] <= found["model"]["largest_error"]
    assert {curve["ranks"][-1] for curve in found["model"]["curves"]} == {1024}


def test_c8_every_strategy_is_checked_against_one_process(results) -> None:
    found = results["strategies"]
    rows = {row["strategy"]: row for row in found["tables"]["strategies"]}
    peers = {"torch DDP", "torch FSDP"}
    assert set(rows) >= {*STRATEGIES, *peers, "apart"}
    same = ("single", "data_parallel", "ddp", "ring", "fsdp", "parameter_server", *peers)
    assert [name for name in same if not rows[name]["equals_one_process"]] == []
    assert not rows["apart"]["equals_one_process"]
    for row in rows.values():
        parts = row["compute_s"] + row["exposed_s"] + row["optimizer_s"] + row["data_s"]
        assert parts == pytest.approx(row["mean_s"]) and row["peak_bytes"] > 0
    assert found["settings"]["seed"] == 0 and {"torch", "slurmddp"} <= set(found["versions"])
    assert found["topology"]["ranks"] == 2 and found["topology"]["backend"] == results["backend"]


def test_c9_nodes_links_and_scaling_are_measured_on_cpus(results) -> None:
    (node,) = results["cluster"]["tables"]["nodes"]
    assert node["cores"] > 0 and node["disk_bytes_per_s"] > 0 and node["memory_bytes"] > 1e8
    assert results["cluster"]["tables"]["links"] == [], "one node has no link to another"
    rows = [(row["scaling"], row["ranks"], row["batch"]) for row in results["scaling"]["tables"]["scaling"]]
    assert rows == [("weak", 1, 4), ("weak", 2, 8), ("strong", 1, 8), ("strong", 2, 8)]


def test_a_batch_that_the_ranks_cannot_share_and_one_rank_are_refused(results) -> None:
    assert "7 samples" in results["refused"]
    with pytest.raises(ConfigError, match="there is a single rank"):
        Distributon(1).launch(measure, Settings(bench="cluster", sizes=(4,)))


def test_numbers_of_ranks_and_efficiency() -> None:
    assert [numbers(count) for count in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]
    assert efficiency("weak", 1.0, 4, 1.25) == 0.8
    assert efficiency("strong", 1.0, 4, 0.25) == 1.0
