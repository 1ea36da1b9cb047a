"""Read iterable data: each reader gets its share, and the position of each reader is saved.

A reader is a rank, or a loader worker of a rank. docs/guides/iterable-data.md describes the
methods of a data set.
Worker w is reader w in every attempt, because data sets divide themselves by `get_worker_info().id`. torch
takes batches from its workers in turn, from worker 0 on. When a resume has to begin with a later reader, the
readers before it give one empty batch first, which the rank drops.

The random draws of a sample (generators of python, torch and NumPy) follow from (seed, epoch, reader, number
of the sample).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError
from slurmddp.training import rng
from slurmddp.training.data.distributed_loader import rebuild
from slurmddp.training.data.passthrough import PassthroughLoader
from slurmddp.training.data.seeding import DatasetWrapper, draws

_NO_SAMPLE = object()
"""The samples of an empty batch."""


class IterableShard(DatasetWrapper, IterableDataset[Any]):
    """Data set that yields one reader's part of the data set `inner`; a reader is a loader worker or a rank.

    The rank calls `begin` before each epoch. Loader workers start after that call and inherit its values.
    """

    def __init__(self, inner: Any, *, seed: int, info: RankInfo, workers: int, batch_size: int) -> None:
        super().__init__(inner)
        self._seed = seed
        self._info = info
        self._readers = max(1, workers)
        self._batch_size = batch_size
        self.begin(0, 0, [])
        self._preserved: tuple[Any, ...] | None = None
        """The states of the rank's random generators from before the current batch was read."""
        self.reader = 0
        """The number of this reader within the rank."""
        self._read = 0
        """How many samples of the epoch this reader has read."""

    def begin(self, epoch: int, first: int, positions: Sequence[Mapping[str, Any] | None]) -> None:
        """Set from which epoch and positions the readers of this rank read next.

        Args:
            epoch: the epoch to read.
            first: the reader from which the next batch has to come.
            positions: the position of each reader (see `position`), None at the begin of the epoch.
        """
        self._epoch = epoch
        self._first = first
        self._positions = positions

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        self.reader = worker.id if worker else 0

        if hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(self._epoch)

        if hasattr(self._inner, "set_share"):
            self._inner.set_share(self._part, self._info.world_size * self._readers)

        samples = self._samples(drop=self._seek())
        if self.reader < self._first:
            return chain(repeat(_NO_SAMPLE, self._batch_size), samples)
        return samples

    def _seek(self) -> int:
        """Move the data set to this reader's position, if the data set can load a state.

        Returns:
            How many samples of the epoch come before the position.
        """
        self._read = 0
        position = self._positions[self.reader] if self._positions else None
        if position is None:
            return 0

        trained: int = position["samples"]
        # A data set that can't load a state is read from its start, and `_samples` drops the trained samples.
        if self.keeps_state:
            self._read = trained
            self._inner.load_state_dict(deepcopy(position["data"]))
        return trained

    @property
    def _part(self) -> int:
        """The number of this reader among the readers of all ranks."""
        return self._info.rank * self._readers + self.reader

    def _samples(self, drop: int) -> Iterator[Any]:
        """Read the data set to its end; yield samples except for the first `drop` of the epoch."""
        samples = self._seeded(lambda: iter(self._inner), -1)
        end = object()

        while (sample := self._seeded(lambda: next(samples, end), self._read)) is not end:
            self._read += 1
            if self._read > drop:
                yield sample

    def _seeded(self, read: Callable[[], Any], number: int) -> Any:
        """Return `read()`, called with the random generators seeded for sample `number` of this reader."""
        if not draws(self._inner):
            return read()

        # In the rank's process, training uses the generators too, so keep their states. In a loader worker
        # nothing else uses them.
        if self._preserved is None and get_worker_info() is None:
            self._preserved = rng.cpu_states()

        rng.seed_sample(rng.derive(self._seed, "stream", self._epoch, self._part, number))
        return read()

    def restore_generators(self) -> None:
        """Restore the random generators of the rank's process to their states before the batch was read."""
        if self._preserved is not None:
            rng.restore_cpu(self._preserved)
            self._preserved = None

    @property
    def keeps_state(self) -> bool:
        """Whether the data set has the methods `state_dict` and `load_state_dict`."""
        return hasattr(self._inner, "state_dict") and hasattr(self._inner, "load_state_dict")

    def position(self) -> dict[str, Any]:
        """Return this reader's position: "samples", the number read, and "data", the data set's state."""
        data = deepcopy(self._inner.state_dict()) if self.keeps_state else None
        return {"samples": self._read, "data": data}


class _CollateWithPosition:
    """The `collate_fn`: it returns (number of the reader, position of the reader, collated batch).

    For an empty batch, position and batch are None.
    """

    def __init__(self, shard: IterableShard, collate: Callable[[Any], Any]) -> None:
        self._shard = shard
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[int, dict[str, Any] | None, Any]:
        shard = self._shard
        if samples is _NO_SAMPLE or (isinstance(samples, list) and samples[0] is _NO_SAMPLE):
            return shard.reader, None, None

        shard.restore_generators()
        return shard.reader, shard.position(), self._collate(samples)


class IterableLoader(PassthroughLoader):
    """A loader over iterable data, read by this rank or by its loader workers in turn.

    Ranks may yield different numbers of samples. So each rank saves its own epoch, its number of batches, and
    the position of each reader after the reader's last batch that the loop received. To resume in the middle
    of an epoch, the numbers of ranks and loader workers must be the same as before.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, seed: int, info: RankInfo, accumulate: int
    ) -> None:
        self._shard = IterableShard(
            loader.dataset,
            seed=seed,
            info=info,
            workers=loader.num_workers,
            batch_size=loader.batch_size or 1,
        )
        # Start new workers in each epoch: a persistent worker would not get the values of the next `begin`.
        options = {"dataset": self._shard, "persistent_workers": False}
        collate_fn = _CollateWithPosition(self._shard, loader.collate_fn)
        shared_loader = rebuild(loader, **options, collate_fn=collate_fn)

        self._readers = max(1, loader.num_workers)
        super().__init__(shared_loader, device, seed, info, accumulate)

    def _to_epoch(self, epoch: int) -> None:
        super()._to_epoch(epoch)
        self._next_reader = 0
        self._positions: list[dict[str, Any] | None] = [None] * self._readers

    def _rest_of_epoch(self) -> Iterator[Any]:
        if self._done and not self._shard.keeps_state:
            self._warn_of_reading_again()

        self._shard.begin(self._epoch, self._next_reader, list(self._positions))

        try:
            for reader, position, batch in self._start_reading():
                if position is None:
                    continue

                self._done = self._done + 1
                self._next_reader = (reader + 1) % self._readers
                self._positions[reader] = position
                yield batch
        finally:
            # `collate_fn` restores the generators after each batch. The last read only finds the end of the
            # data, so no batch follows it. Restore the generators after it, too.
            self._shard.restore_generators()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "workers": self._loader.num_workers}

    def rank_state(self) -> dict[str, Any] | None:
        return {
            "epoch": self._epoch,
            "batches": self._done,
            "workers": self._loader.num_workers,
            "next": self._next_reader,
            "places": list(self._positions),
        }

    def check_rank_states(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        for state in states:
            if state is not None and state["batches"]:
                workers = state["workers"]
                also = "" if workers == self._loader.num_workers else f" and num_workers={workers}"
                self._require_ranks(len(states), state["batches"], also)
                self._require_workers(workers)

        epochs = sorted({state["epoch"] for state in states if state is not None})
        if len(epochs) > 1 and len(states) != self._world_size:
            raise MismatchError(
                f"When the checkpoint was written, its {len(states)} ranks were in different epochs of "
                f"{type(self.dataset).__name__}: {', '.join(map(str, epochs))}. So {self._world_size} "
                "rank(s) can't continue from it.",
                hint=f"Resume with {len(states)} ranks.",
            )

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        if state["batches"]:
            self._require_workers(state.get("workers", 0))

        self._to_epoch(self._epoch)

    def load_rank_state(self, state: dict[str, Any]) -> None:
        self._to_epoch(state["epoch"])
        if state["batches"]:
            self._done = state["batches"]
            self._next_reader = state["next"]
            self._positions = list(state["places"])

    def _require_workers(self, workers: int) -> None:
        """Raise MismatchError if the checkpoint was written with another number of loader workers."""
        workers_now = self._loader.num_workers
        if workers != workers_now:
            raise MismatchError(
                f"{workers} loader worker(s) per rank read the iterable {type(self.dataset).__name__} when "
                f"the checkpoint was written; {workers_now} of them can't resume within an epoch.",
                hint=f"Resume with num_workers={workers} (`train.workers={workers}`).",
            )
