"""A result of `slurmddp bench` with round numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slurmddp.bench.results import Result
from slurmddp.bench.settings import Settings

TOPOLOGY = {"ranks": 4, "nodes": 2, "hosts": ["a", "b"], "device": "cpu", "backend": "gloo"}


def node(name: str, disk: float = 1e9, clock: float = 0.0) -> dict[str, Any]:
    return {"node": name, "cores": 8, "disk_bytes_per_s": disk, "clock_offset_s": clock, "gpus": ""}


def link(first: str, second: str, bandwidth: float = 1e9, latency: float = 1e-5) -> dict[str, Any]:
    took = {"median_s": latency, "shortest_s": latency, "bytes_per_s": bandwidth}
    return {"from": first, "to": second, **took}


def reduction(algorithm: str, size: int, seconds: float) -> dict[str, Any]:
    return {
        "algorithm": algorithm, "bytes": size, "median_s": seconds, "spread_s": seconds / 10,
        "bus_bytes_per_s": 1.5 * size / seconds, "messages": None if algorithm == "torch" else 6,
    }  # fmt: skip


def step(name: str, *, equal: bool = True) -> dict[str, Any]:
    parts = {"compute_s": 6e-3, "exposed_s": 2e-3, "optimizer_s": 1e-3, "data_s": -1e-6}
    return {"strategy": name, "median_s": 9e-3, "mean_s": 9e-3, **parts, "equals_one_process": equal}


MODEL = {
    "alpha_s": 2e-6, "beta_s": 1e-9, "gamma_s": 1e-10, "held_out": [4000], "median_error": 0.1,
    "largest_error": 0.25,
    "curves": [
        {"algorithm": name, "bytes": 1000, "ranks": [2, 1024], "seconds": [1e-5, last]}
        for name, last in (("ring", 1e-3), ("tree", 1e-4), ("sharded_server", 1e-3))
    ],
}  # fmt: skip
TABLES = {
    "cluster": {"nodes": [node("a"), node("b")], "links": [link("a", "b")],
                "all_reduce": [reduction("torch", 1000, 1e-4)]},
    "collectives": {"all_reduce": [
        reduction(name, size, size * 1e-8) for name in ("torch", "ring") for size in (1000, 64_000_000)
    ]},
    "strategies": {"strategies": [
        step("ddp"), step("local_sgd", equal=False), {"strategy": "x", "note": "No."},
    ]},
    "scaling": {"scaling": [
        {"scaling": kind, "ranks": ranks, "batch": 64, "median_s": 1e-3, "efficiency": 1 / ranks}
        for kind in ("weak", "strong") for ranks in (1, 2)
    ]},
}  # fmt: skip


def bench_result(bench: str, **more: Any) -> Result:
    """Return a result; `more` replaces its fields."""
    settings = asdict(Settings(bench=bench, sizes=(1000, 64_000_000)))
    model = MODEL if bench == "collectives" else {}
    fields = {
        "settings": settings, "topology": TOPOLOGY, "versions": {"torch": "2.13"}, "tables": TABLES[bench],
        "model": model,
    }  # fmt: skip
    return Result(**{**fields, **more})
