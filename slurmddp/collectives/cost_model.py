"""Predict the time of an all-reduce from latency, bandwidth and the speed of additions, by pure functions.

The time is the sum of three parts of the busiest rank's work: a latency per message, the time to send its
bytes over its network link, and the time to add up bytes.

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClusterCosts:
    """The constants of the cost model for a cluster: latency, and seconds per byte sent and added."""

    alpha_s: float
    """Latency of a message, in seconds."""
    beta_s: float
    """Seconds to send a byte."""
    gamma_s: float
    """Seconds per byte to add two tensors."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The messages and bytes of the busiest rank in one all-reduce."""

    messages: float
    """Number of messages that the rank sends one after the other."""
    sent: float
    """Bytes that pass through the rank's network link."""
    added: float
    """Bytes that the rank adds to other bytes."""

    def seconds(self, costs: ClusterCosts) -> float:
        """Return the seconds that the cost model predicts for this work."""
        return self.messages * costs.alpha_s + self.sent * costs.beta_s + self.added * costs.gamma_s


def _ring(ranks: int, size: float) -> Work:
    share = (ranks - 1) / ranks
    return Work(messages=2 * (ranks - 1), sent=2 * share * size, added=share * size)


def _halving_doubling(ranks: int, size: float) -> Work:
    power = 1 << (ranks.bit_length() - 1)
    share = (power - 1) / power
    # If the number of ranks is not a power of two, some ranks first send their tensor to a partner, and get
    # the result from it at the end.
    extra = int(power < ranks)

    return Work(
        messages=2 * math.log2(power) + 2 * extra,
        sent=2 * share * size + 2 * extra * size,
        added=share * size + extra * size,
    )


def _tree(ranks: int, size: float) -> Work:
    steps = math.ceil(math.log2(ranks))
    return Work(messages=2 * steps, sent=2 * steps * size, added=steps * size)


def _central_server(ranks: int, size: float) -> Work:
    others = ranks - 1
    return Work(messages=2 * others, sent=2 * others * size, added=others * size)


def _all_gather(ranks: int, size: float) -> Work:
    others = ranks - 1
    return Work(messages=others, sent=others * size, added=others * size)


WORK: Mapping[str, Callable[[int, float], Work]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "central_server": _central_server,
    "sharded_server": _ring,
    "all_gather": _all_gather,
}
"""By name of an algorithm, a function that returns its work for a number of ranks and of bytes."""


def bus_bandwidth(size: float, ranks: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce in bytes per second, as nccl-tests defines it.

    Unlike the size divided by the time, it is comparable between different numbers of ranks.

    Args:
        size: bytes of the tensor.
        ranks: number of ranks.
        seconds: the measured time in seconds.
    """
    return size / seconds * 2 * (ranks - 1) / ranks
