"""Time an action on all ranks, repeatedly, so that the slowest rank counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import distributed


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return how long an action takes on this rank, with the work of its GPU."""
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_slowest_rank(
    own: Sequence[float], device: torch.device, group: distributed.ProcessGroup | None = None
) -> list[float]:
    """Return the largest of each number over all ranks."""
    # CPU float64, unless the backend moves tensors of a GPU only.
    worst = torch.tensor(list(own), dtype=torch.float64, device=device)
    distributed.all_reduce(worst, distributed.ReduceOp.MAX, group=group)
    return [float(one) for one in worst.tolist()]


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return median and interquartile range in seconds, as columns of a row."""
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {"median_s": statistics.median(times), "spread_s": quarters[2] - quarters[0]}
