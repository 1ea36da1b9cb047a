"""Time and count every all-reduce algorithm beside torch's own, and fit the cost model to the times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
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
"""The name of torch's own all-reduce, of the chosen backend, in tables."""
_CURVE_RANKS = [2**power for power in range(1, 11)]
_CURVE_BYTES = (1_000, 1_000_000, 64_000_000)
"""Numbers of ranks, and sizes of the tensor, for which the cost model predicts times."""


def measure_collectives(d: Distributon, settings: Settings) -> dict[str, Any]:
    """Measure torch's all-reduce and every algorithm in `ALGORITHMS`, and fit the cost model to their times.

    Returns:
        `all_reduce`: the rows of this table. `model`: the fitted cost model (see `cost_model`); empty if the
        settings have too few sizes to hold some out of the fit.
    """
    rows = all_reduce_table(d, settings, [TORCH, *ALGORITHMS])
    times = [
        Measurement.all_reduce(row["algorithm"], d.world_size, row["bytes"], row["median_s"])
        for row in rows
        if row["algorithm"] in WORK
    ]
    times += _additions(d, settings)

    model = cost_model(times) if held_out_sizes(settings.sizes) else {}
    return {"all_reduce": rows, "model": model}


def all_reduce_table(d: Distributon, settings: Settings, names: Sequence[str]) -> list[dict[str, Any]]:
    """Measure all-reduce algorithms, and return a row for each size and algorithm.

    Each repetition runs every algorithm once, so that a disturbance of the machine affects all of them.

    Args:
        d: a launched Distributon.
        settings: sizes, repetitions and warm-up.
        names: the algorithms: keys of `ALGORITHMS`, or `TORCH`.
    """
    return [row for size in settings.sizes for row in _rows_of_size(d, settings, size, names)]


def _rows_of_size(
    d: Distributon, settings: Settings, size: int, names: Sequence[str]
) -> list[dict[str, Any]]:
    # The seed depends on the rank: with equal numbers on all ranks, an algorithm that adds the wrong rank's
    # numbers would still give the right sum.
    source = torch.rand(size // 4, generator=torch.Generator().manual_seed(settings.seed + d.rank))
    source = source.to(d.device)
    expected = source.clone()
    distributed.all_reduce(expected)
    links = {name: CountedLink(GroupLink()) for name in names}
    errors = {name: _largest_error(name, source, expected, links[name]) for name in names}

    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(settings.warmup + settings.repetitions):
        for name in names:
            flat = source.clone()
            distributed.barrier()
            times[name].append(seconds(_reduction(name, flat, GroupLink()), d.device))

    rows = []
    for name in names:
        slowest = spread(of_slowest_rank(times[name], d.device)[settings.warmup :])
        rows.append(
            {
                "algorithm": name,
                "bytes": size,
                **slowest,
                "bus_bytes_per_s": bus_bandwidth(size, d.world_size, slowest["median_s"]),
                **_counts(name, links[name], d.device),
                "largest_error": max(of_slowest_rank([errors[name]], d.device)),
            }
        )
    return rows


def _reduction(name: str, flat: torch.Tensor, link: CountedLink | GroupLink) -> Callable[[], object]:
    if name == TORCH:
        return lambda: distributed.all_reduce(flat)
    return lambda: ALGORITHMS[name](flat, link)


def _largest_error(name: str, source: torch.Tensor, expected: torch.Tensor, link: CountedLink) -> float:
    """Reduce `source` once over `link`, which counts messages and bytes.

    Returns:
        The largest absolute difference of an element from `expected`, the sum by torch's all-reduce.
    """
    flat = source.clone()
    _reduction(name, flat, link)()
    return float((flat - expected).abs().max())


def _counts(name: str, link: CountedLink, device: torch.device) -> dict[str, int | None]:
    """Return the messages and bytes that `link` has counted, as maxima over all ranks.

    Both are None for torch's own all-reduce, which does not use the link.
    """
    # Call this collective for torch's all-reduce, too: all ranks must call it, although its result is not
    # used then.
    messages, sent = of_slowest_rank([link.messages, link.bytes], device)
    if name == TORCH:
        return {"messages": None, "bytes_sent": None}
    return {"messages": int(messages), "bytes_sent": int(sent)}


def _additions(d: Distributon, settings: Settings) -> list[Measurement]:
    """Time the addition of two tensors of each size, on all ranks at once, for the fit of the cost model."""
    measurements = []
    for size in settings.sizes:
        total = torch.rand(size // 4, device=d.device)
        summand = torch.rand(size // 4, device=d.device)
        times = [
            seconds(partial(total.add_, summand), d.device)
            for _ in range(settings.warmup + settings.repetitions)
        ]
        median_s = spread(of_slowest_rank(times, d.device)[settings.warmup :])["median_s"]
        measurements.append(Measurement.addition(size, median_s))

    return measurements


def cost_model(times: Sequence[Measurement]) -> dict[str, Any]:
    """Fit the cost model to times, without the held-out sizes.

    Returns:
        The fitted constants, the errors of the predictions for the held-out sizes, and `curves`: for each
        algorithm and size, the predicted seconds on 2 to 1,024 ranks.
    """
    validation = validate(times)
    return {
        **asdict(validation.costs),
        "held_out": list(validation.held_out),
        "median_error": validation.median_error,
        "largest_error": validation.largest_error,
        "curves": [
            {
                "algorithm": name,
                "bytes": size,
                "ranks": _CURVE_RANKS,
                "seconds": [work(ranks, size).seconds(validation.costs) for ranks in _CURVE_RANKS],
            }
            for name, work in WORK.items()
            for size in _CURVE_BYTES
        ],
    }
