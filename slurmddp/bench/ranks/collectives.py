"""Time and count every all-reduce algorithm beside torch's own, and fit the cost model to the times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed

from slurmddp.bench.ranks.timing import of_slowest_rank, seconds, spread
from slurmddp.bench.settings import Settings
from slurmddp.collectives import ALGORITHMS
from slurmddp.collectives.cost_model import WORK, bus_bandwidth
from slurmddp.collectives.cost_model_fit import Measurement, held_out_sizes, validate
from slurmddp.collectives.link import CountedLink, GroupLink
from slurmddp.training.distributon import Distributon

TORCH = "torch"
"""The row of torch's own all-reduce, of the chosen backend."""
_CURVE_RANKS = [2**power for power in range(1, 11)]
_CURVE_BYTES = (1_000, 1_000_000, 64_000_000)


def measure_collectives(d: Distributon, settings: Settings) -> dict[str, Any]:
    """Return the table `all_reduce` and the cost model that was fitted to a part of its sizes."""
    rows = all_reduce_table(d, settings, [TORCH, *ALGORITHMS])
    times = [_measured(row, d.world_size) for row in rows if row["algorithm"] in WORK]
    times += _additions(d, settings)
    return {"all_reduce": rows, "model": cost_model(times) if held_out_sizes(settings.sizes) else {}}


def all_reduce_table(d: Distributon, settings: Settings, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each size and algorithm.

    The algorithms take turns, so that a disturbance of the machine meets all of them.

    Args:
        d: launched.
        settings: sizes, repetitions and warm-up.
        names: of `ALGORITHMS`, or `TORCH`.
    """
    return [row for size in settings.sizes for row in _rows_of_size(d, settings, size, names)]


def _rows_of_size(
    d: Distributon, settings: Settings, size: int, names: Sequence[str]
) -> list[dict[str, Any]]:
    # Each rank has numbers of its own: equal ones would hide a wrong sum.
    own = torch.rand(size // 4, generator=torch.Generator().manual_seed(settings.seed + d.rank))
    own = own.to(d.device)
    expected = own.clone()
    distributed.all_reduce(expected)
    counted = {name: CountedLink(GroupLink()) for name in names}
    error = {name: _largest_error(name, own, expected, counted[name]) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(settings.warmup + settings.repetitions):
        for name in names:
            flat = own.clone()
            distributed.barrier()
            times[name].append(seconds(_reduction(name, flat, GroupLink()), d.device))
    return [
        {
            "algorithm": name,
            "bytes": size,
            **(took := spread(of_slowest_rank(times[name], d.device)[settings.warmup :])),
            "bus_bytes_per_s": bus_bandwidth(size, d.world_size, took["median_s"]),
            **_counts(name, counted[name], d.device),
            "largest_error": max(of_slowest_rank([error[name]], d.device)),
        }
        for name in names
    ]


def _reduction(name: str, flat: torch.Tensor, link: CountedLink | GroupLink) -> Callable[[], object]:
    if name == TORCH:
        return lambda: distributed.all_reduce(flat)
    return lambda: ALGORITHMS[name](flat, link)


def _largest_error(name: str, own: torch.Tensor, expected: torch.Tensor, link: CountedLink) -> float:
    """Reduce once, counted; return the largest difference to torch's sum."""
    flat = own.clone()
    _reduction(name, flat, link)()
    return float((flat - expected).abs().max())


def _counts(name: str, link: CountedLink, device: torch.device) -> dict[str, int | None]:
    """Return the messages and bytes that the busiest rank sends; None for torch's own all-reduce."""
    messages, sent = of_slowest_rank([link.messages, link.bytes], device)
    counted = name != TORCH
    return {"messages": int(messages) if counted else None, "bytes_sent": int(sent) if counted else None}


def _measured(row: dict[str, Any], ranks: int) -> Measurement:
    return Measurement.all_reduce(row["algorithm"], ranks, row["bytes"], row["median_s"])


def _additions(d: Distributon, settings: Settings) -> list[Measurement]:
    """Time the addition of two tensors of each size, on all ranks at once."""
    found = []
    for size in settings.sizes:
        one, other = torch.rand(size // 4, device=d.device), torch.rand(size // 4, device=d.device)
        times = [
            seconds(lambda one=one, other=other: one.add_(other), d.device)  # type: ignore[misc]
            for _ in range(settings.warmup + settings.repetitions)
        ]
        median = spread(of_slowest_rank(times, d.device)[settings.warmup :])["median_s"]
        found.append(Measurement.addition(size, median))
    return found


def cost_model(times: Sequence[Measurement]) -> dict[str, Any]:
    """Return the fitted constants, their error on held-out sizes, and curves up to 1,024 nodes."""
    found = validate(times)
    return {
        **asdict(found.costs),
        "held_out": list(found.held_out),
        "median_error": found.median_error,
        "largest_error": found.largest_error,
        "curves": [
            {
                "algorithm": name,
                "bytes": size,
                "ranks": _CURVE_RANKS,
                "seconds": [work(ranks, size).seconds(found.costs) for ranks in _CURVE_RANKS],
            }
            for name, work in WORK.items()
            for size in _CURVE_BYTES
        ],
    }
