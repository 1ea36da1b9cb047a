"""Time an action repeatedly on all ranks; the time of an action is the time of the slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import distributed


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Call a function, and return the seconds that it took on this rank, with the GPU work that it starts."""
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has completed its queued work; return at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_slowest_rank(
    values: Sequence[float], device: torch.device, group: distributed.ProcessGroup | None = None
) -> list[float]:
    """Return the maximum of each value over all ranks of a group. All ranks of the group call it."""
    # The tensor is on the rank's device, because some backends, such as NCCL, reduce only GPU tensors.
    largest = torch.tensor(list(values), dtype=torch.float64, device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
    return [float(value) for value in largest.tolist()]


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return the median and the interquartile range of times, as the columns `median_s` and `spread_s`."""
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {"median_s": statistics.median(times), "spread_s": quarters[2] - quarters[0]}
