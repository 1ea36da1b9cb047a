"""Read the peak memory of each rank from the events of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurmddp.runs.folder.history import of_newest_attempt

_GIB = 1 << 30


@dataclass(frozen=True)
class PeakMemory:
    """The largest number of bytes that each rank of an attempt has held at once."""

    ranks: tuple[int, ...]
    device: str
    """`cuda`: memory of the GPU; `cpu`: memory of the host, with what processes share."""

    @property
    def place(self) -> str:
        return "GPU" if self.device == "cuda" else "host"

    @property
    def largest(self) -> str:
        """The largest peak of a rank, such as `3.21 GiB`."""
        return gib(max(self.ranks))

    @property
    def largest_rank(self) -> int:
        return self.ranks.index(max(self.ranks))


def newest_peak_memory(events: Iterable[Mapping[str, Any]]) -> PeakMemory | None:
    """Return the peak memory of the newest attempt from its last `memory` event; None if it has none."""
    _, newest = of_newest_attempt(events)
    for event in reversed(list(newest)):
        if event.get("event") != "memory":
            continue
        ranks = event.get("peak_bytes")
        if isinstance(ranks, list) and ranks and all(isinstance(peak, int) for peak in ranks):
            return PeakMemory(tuple(ranks), str(event.get("device", "")))
    return None


def gib(count: int) -> str:
    """Return a number of bytes as text in GiB, such as `3.21 GiB`."""
    return f"{count / _GIB:.2f} GiB"
