"""Time an action on all ranks, repeatedly; the slowest rank counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import distributed


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that an action takes on this rank, including its work on a GPU."""
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has completed its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_slowest_rank(
    values: Sequence[float], device: torch.device, group: distributed.ProcessGroup | None = None
) -> list[float]:
    """Return the maximum of each value over all ranks. All ranks call it."""
    # On the rank's device: some backends move tensors of a GPU only.
    largest = torch.tensor(list(values), dtype=torch.float64, device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
    return [float(value) for value in largest.tolist()]


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return median and interquartile range of times in seconds, as columns of a row."""
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {"median_s": statistics.median(times), "spread_s": quarters[2] - quarters[0]}
