"""Data whose order is its owner's: a sampler of one's own, or an iterable data set.

Nothing is divided among the ranks: the sampler looks at the rank, and an iterable data set is told its share
(`training/data/iterable.py` states that contract). At the start of each epoch `set_epoch(epoch)` is called,
where there is one. A sampler is asked again from the start of the epoch, and the batches that were trained
are thrown away, which gives the same samples only if the order is the same again; iterable data can do
better. Either way a resume in the middle of an epoch takes the same number of ranks, of iterable data also of
loader workers, and only batches that the loop was handed count as trained, whatever loader workers have
fetched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import CheckpointError, MismatchError
from slurmddp.training.data.base import DistributedLoader, rebuild
from slurmddp.training.data.iterable import IterableShard, Stamp

log = logging.getLogger(__name__)


class PassthroughLoader(DistributedLoader):
    """A loader that counts the batches it handed out, in the order that somebody else gives them."""

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, seed: int, info: RankInfo, accumulate: int
    ) -> None:
        super().__init__(loader, device, seed, info, accumulate)
        self._epoch = self._done = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def remaining(self) -> int:
        return max(0, len(self) - self._done)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batches": self._done, "world_size": self._world_size}

    def _key(self) -> tuple[int, int]:
        return self._epoch, 0

    def _next_epoch(self) -> None:
        self._epoch, self._done = self._epoch + 1, 0

    def _rest_of_epoch(self) -> Iterator[Any]:
        for owner in (self._loader.sampler, self._loader.batch_sampler, self._loader.dataset):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
        if self._done:
            self._warn_of_reading_again()
        for number, batch in enumerate(self._started()):
            if number >= self._done:
                self._done = number + 1
                yield batch

    def _warn_of_reading_again(self) -> None:
        log.warning(
            "%s is read again from the start of its epoch, and %d batches that were trained are thrown "
            "away: this is right only if its order is the same as before.",
            type(self.dataset).__name__,
            self._done,
        )

    def _load(self, state: dict[str, Any]) -> None:
        if not {"epoch", "batches"} <= state.keys():
            raise CheckpointError(
                "The checkpoint's data loader had no sampler of its own, and this one has.",
                hint="Load the data as in the run that wrote the checkpoint.",
            )
        if state["batches"]:
            self._require_ranks(state.get("world_size", self._world_size), state["batches"])
        self._epoch, self._done = state["epoch"], state["batches"]

    def _require_ranks(self, ranks: int, batches: int) -> None:
        if ranks != self._world_size:
            raise MismatchError(
                f"{ranks} ranks had read {batches} batches each of {type(self.dataset).__name__}, "
                f"whose order is its own; it can't go on with {self._world_size} from there.",
                hint=f"Go on with {ranks} ranks, or use map-style data without a sampler of your own.",
            )


class StreamLoader(PassthroughLoader):
    """A loader over iterable data, read by this rank or by its loader workers in turn.

    Ranks may have shares of different lengths, so each saves its own epoch and batches, and with them how far
    each of its readers was when it gave its last batch that the loop was handed.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, seed: int, info: RankInfo, accumulate: int
    ) -> None:
        self._stream = IterableShard(loader.dataset, seed=seed, info=info, workers=loader.num_workers)
        # Workers that outlived an epoch would not hear of the next one.
        options = {"dataset": self._stream, "persistent_workers": False}
        own = rebuild(loader, **options, collate_fn=Stamp(self._stream, loader.collate_fn))
        super().__init__(own, device, seed, info, accumulate)
        self._readers = max(1, loader.num_workers)
        self._to_epoch(0)

    def _to_epoch(self, epoch: int) -> None:
        self._epoch, self._done, self._next = epoch, 0, 0
        self._places: list[dict[str, Any] | None] = [None] * self._readers

    def _next_epoch(self) -> None:
        self._to_epoch(self._epoch + 1)

    def _rest_of_epoch(self) -> Iterator[Any]:
        if self._done and not self._stream.keeps_state:
            self._warn_of_reading_again()
        self._stream.begin(self._epoch, self._next, list(self._places))
        try:
            for reader, place, batch in self._started():
                self._done, self._next = self._done + 1, (reader + 1) % self._readers
                self._places[reader] = place
                yield batch
        finally:  # The read that finds the end of the data draws too.
            self._stream.put_back()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "workers": self._loader.num_workers}

    def rank_state(self) -> dict[str, Any] | None:
        own = {"epoch": self._epoch, "batches": self._done, "workers": self._loader.num_workers}
        return {**own, "next": self._next, "places": list(self._places)}

    def check_rank_states(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        for state in states:
            if state is not None and state["batches"]:
                self._require_ranks(len(states), state["batches"])
                self._require_workers(state["workers"])

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        if state["batches"]:
            self._require_workers(state.get("workers", 0))
        self._to_epoch(self._epoch)

    def load_rank_state(self, state: dict[str, Any]) -> None:
        self._to_epoch(state["epoch"])
        if state["batches"]:
            self._done, self._next, self._places = state["batches"], state["next"], list(state["places"])

    def _require_workers(self, workers: int) -> None:
        here = self._loader.num_workers
        if workers != here:
            raise MismatchError(
                f"{workers} loader workers per rank shared {type(self.dataset).__name__}, which is iterable, "
                f"when the checkpoint was written; {here} can't take over in the middle of an epoch.",
                hint=f"Go on with num_workers={workers} (`train.workers={workers}`).",
            )
