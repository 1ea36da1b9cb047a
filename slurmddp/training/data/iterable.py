"""Iterable data as one of several readers sees it: its own share, and a place that a checkpoint can keep.

A reader is a rank, or one of its loader workers. The contract, of which a data set has what it needs:

- `set_share(part, parts)`: called before each epoch in every reader; from then on only the samples of that
  part come, so that all parts together give each sample once. Without it nothing is divided.
- `set_epoch(epoch)`: called before each epoch; without it every epoch has the same order.
- `state_dict()` and `load_state_dict(state)` (plain values and tensors): an iterator that begins after
  `load_state_dict` goes on after the samples that had come before `state_dict`. Without them a reader reads
  again, and throws away, what it had read of the epoch; the order then has to follow from the epoch alone.

What a sample draws at random follows from (seed, epoch, reader, number of the sample), as far as the
generators of python, torch and NumPy go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from slurmddp.environments.rank_info import RankInfo
from slurmddp.training import rng
from slurmddp.training.data.seeding import DatasetProxy, draws


class IterableShard(DatasetProxy, IterableDataset[Any]):
    """Reads `inner` in each of a rank's readers; to everybody else it looks like `inner`.

    `begin` says in the rank's own process what the next iteration is; loader workers that start after it have
    the same answer.
    """

    own_names = (
        "_inner",
        "_seed",
        "_info",
        "_readers",
        "_epoch",
        "_first",
        "_places",
        "_reader",
        "_read",
        "_kept",
    )

    def __init__(self, inner: Any, *, seed: int, info: RankInfo, workers: int) -> None:
        self._inner, self._seed, self._info = inner, seed, info
        self._readers = max(1, workers)
        self.begin(0, 0, [])
        self._kept: tuple[Any, ...] | None = None
        self._reader = self._read = 0
        """Which of the rank's readers this process is, and how many samples of the epoch it has given."""

    def begin(self, epoch: int, first: int, places: Sequence[Mapping[str, Any] | None]) -> None:
        """Let `epoch` go on where its readers stood, with a batch of reader `first` as the next one."""
        self._epoch, self._first, self._places = epoch, first, places

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        # torch asks its workers in turn, beginning with the first one.
        self._reader = (self._first + (worker.id if worker else 0)) % self._readers
        part, parts = self._info.rank * self._readers + self._reader, self._info.world_size * self._readers
        for name, values in (("set_epoch", (self._epoch,)), ("set_share", (part, parts))):
            if hasattr(self._inner, name):
                getattr(self._inner, name)(*values)
        place = self._places[self._reader] if self._places else None
        self._read = place["samples"] if place and self.keeps_state else 0
        if place and self.keeps_state:
            self._inner.load_state_dict(deepcopy(place["data"]))
        return self._samples(again=place["samples"] - self._read if place else 0)

    def _samples(self, again: int) -> Iterator[Any]:
        samples = self._drawing(lambda: iter(self._inner), -1)
        end = object()
        while (sample := self._drawing(lambda: next(samples, end), self._read)) is not end:
            self._read += 1
            if self._read > again:
                yield sample

    def _drawing(self, read: Callable[[], Any], number: int) -> Any:
        if not draws(self._inner):
            return read()
        if self._kept is None and get_worker_info() is None:
            self._kept = rng.keep()
        place = self._info.rank * self._readers + self._reader
        rng.seed_sample(rng.derive(self._seed, "stream", self._epoch, place, number))
        return read()

    def put_back(self) -> None:
        """Give the rank's own process back the generators that it had before the batch."""
        if self._kept is not None:
            rng.put_back(self._kept)
            self._kept = None

    @property
    def keeps_state(self) -> bool:
        """Whether the data set can say, and be told, how far it is."""
        return hasattr(self._inner, "state_dict") and hasattr(self._inner, "load_state_dict")

    def place(self) -> dict[str, Any]:
        """Return how far this reader is."""
        data = deepcopy(self._inner.state_dict()) if self.keeps_state else None
        return {"samples": self._read, "data": data}

    @property
    def reader(self) -> int:
        return self._reader


class Stamp:
    """Collates a batch and says which reader it came from and where that stood then."""

    def __init__(self, stream: IterableShard, collate: Callable[[Any], Any]) -> None:
        self._stream, self._collate = stream, collate

    def __call__(self, samples: Any) -> tuple[int, dict[str, Any], Any]:
        worker = get_worker_info()
        stream: IterableShard = worker.dataset if worker else self._stream  # type: ignore[assignment]
        stream.put_back()
        return stream.reader, stream.place(), self._collate(samples)
