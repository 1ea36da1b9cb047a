"""Time a step of DistributedDataParallel on growing numbers of ranks, with the same kernels and data."""

from __future__ import annotations

from typing import Any

from torch import distributed

from slurmddp.bench.ranks import steps
from slurmddp.bench.ranks.timing import of_slowest_rank, spread
from slurmddp.bench.settings import Settings
from slurmddp.training.distributon import Distributon

WEAK, STRONG = "weak", "strong"


def numbers(world_size: int) -> list[int]:
    """Return 1, 2, 4, ... and the number of all ranks."""
    powers = [1 << power for power in range(world_size.bit_length()) if 1 << power < world_size]
    return [*powers, world_size]


def efficiency(kind: str, alone_s: float, ranks: int, seconds: float) -> float:
    """Return the share of ideal scaling: t1/tN for a fixed batch per rank, t1/(N tN) for a fixed batch."""
    return alone_s / seconds / (ranks if kind == STRONG else 1)


def measure_scaling(d: Distributon, settings: Settings) -> dict[str, Any]:
    """Return the table `scaling`: weak with batch/ranks samples per rank, strong with the batch shared."""
    part = settings.batch // d.world_size
    rows: list[dict[str, Any]] = []
    for kind in (WEAK, STRONG):
        for ranks in numbers(d.world_size):
            batch = part * ranks if kind == WEAK else settings.batch // ranks * ranks
            took = spread(_step_times(d, settings, ranks, batch))
            first = next((row["median_s"] for row in rows if row["scaling"] == kind), took["median_s"])
            reached = efficiency(kind, first, ranks, took["median_s"])
            rows.append({"scaling": kind, "ranks": ranks, "batch": batch, **took, "efficiency": reached})
    return {"scaling": rows}


def _step_times(d: Distributon, settings: Settings, ranks: int, batch: int) -> list[float]:
    """Return the step times of the slowest of the first `ranks` ranks; the others wait."""
    count, own = settings.warmup + settings.repetitions, batch // ranks
    group = distributed.new_group(list(range(ranks)))
    whole = [0.0] * count
    if d.rank < ranks:
        model = steps.wrap_ddp(steps.build_model(settings, d.device), d.device, group)
        share = slice(d.rank * own, (d.rank + 1) * own)
        batches = steps.build_batches(settings, batch)
        optimizer = steps.build_optimizer(model)
        whole = steps.train(model, optimizer, batches, share, count, d.device).whole
    d.barrier()
    return of_slowest_rank(whole, d.device)[settings.warmup :]
