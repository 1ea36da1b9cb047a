"""Time a step of DistributedDataParallel on growing numbers of ranks, with the same kernels and data."""

from __future__ import annotations

from typing import Any

from torch import distributed

from slurmddp.bench.ranks import steps
from slurmddp.bench.ranks.timing import of_slowest_rank, spread
from slurmddp.bench.settings import Settings
from slurmddp.training.distributon import Distributon

WEAK = "weak"
STRONG = "strong"


def numbers(world_size: int) -> list[int]:
    """Return the numbers of ranks to measure: the powers of two below `world_size`, and `world_size`."""
    powers = [1 << power for power in range(world_size.bit_length()) if 1 << power < world_size]
    return [*powers, world_size]


def efficiency(kind: str, alone_s: float, ranks: int, seconds: float) -> float:
    """Return the parallel efficiency, which is 1 for ideal scaling.

    With the time tN of a step on N ranks, it is t1 / tN for weak scaling and t1 / (N tN) for strong scaling.

    Args:
        kind: `WEAK`: the batch per rank is fixed; `STRONG`: the batch of all ranks is fixed.
        alone_s: the seconds of a step on one rank.
        ranks: the number of ranks.
        seconds: the seconds of a step on `ranks` ranks.
    """
    speedup = alone_s / seconds
    return speedup / ranks if kind == STRONG else speedup


def measure_scaling(d: Distributon, settings: Settings) -> dict[str, Any]:
    """Time steps on 1, 2, 4, ... and all ranks, and return the rows of the table `scaling`.

    Weak scaling: each rank has `batch / world_size` samples on any number of ranks. Strong scaling: the ranks
    share the whole batch, rounded down to a multiple of their number. All ranks call it.
    """
    samples_per_rank = settings.batch // d.world_size
    rows: list[dict[str, Any]] = []
    for kind in (WEAK, STRONG):
        alone_s = 0.0
        for ranks in numbers(d.world_size):
            batch = samples_per_rank * ranks
            if kind == STRONG:
                batch = settings.batch // ranks * ranks

            times = spread(_step_times(d, settings, ranks, batch))
            if ranks == 1:
                alone_s = times["median_s"]
            share = efficiency(kind, alone_s, ranks, times["median_s"])
            rows.append({"scaling": kind, "ranks": ranks, "batch": batch, **times, "efficiency": share})

    return {"scaling": rows}


def _step_times(d: Distributon, settings: Settings, ranks: int, batch: int) -> list[float]:
    """Train on the first `ranks` ranks while the other ranks wait.

    Returns:
        The maximum over the ranks of the seconds of each step, without the warm-up steps.
    """
    count = settings.warmup + settings.repetitions
    samples = batch // ranks
    group = distributed.new_group(list(range(ranks)))

    times = [0.0] * count
    if d.rank < ranks:
        model = steps.wrap_ddp(steps.build_model(settings, d.device), d.device, group)
        share = slice(d.rank * samples, (d.rank + 1) * samples)
        batches = steps.build_batches(settings, batch)
        optimizer = steps.build_optimizer(model)
        times = steps.train(model, optimizer, batches, share, count, d.device).whole

    d.barrier()
    return of_slowest_rank(times, d.device)[settings.warmup :]
