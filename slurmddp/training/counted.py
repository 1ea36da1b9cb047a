"""Data whose order is its owner's: a sampler of one's own, or an iterable data set.

The contract. Nothing is divided among the ranks: the sampler or the data set looks at the rank. At the start
of each epoch `set_epoch(epoch)` is called, where there is one. An iterable data set with `state_dict` and
`load_state_dict` (plain values and tensors), read in the rank's own process (no loader workers), is saved by
every rank and goes on from its state: its next iterator begins after the samples that came before
`state_dict`. All others are read again from the start of the epoch, with a warning, and the batches that were
trained are thrown away, which gives the same samples only if the order is the same again. Either way a resume
in the middle of an epoch takes the same number of ranks, and only batches that the loop was handed count as
trained, whatever loader workers have fetched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import CheckpointError, MismatchError
from slurmddp.training.loader_base import DistributedLoader

log = logging.getLogger(__name__)


class CountedLoader(DistributedLoader):
    """A loader that counts the batches it handed out, in the order that somebody else gives them."""

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, seed: int, info: RankInfo, accumulate: int
    ) -> None:
        super().__init__(loader, device, seed, info, accumulate)
        self._epoch = self._done = 0
        self._data_state: dict[str, Any] | None = None
        """What the data set has to be given before its next iteration."""

    @property
    def epoch(self) -> int:
        return self._epoch

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batches": self._done, "world_size": self._world_size}

    def rank_state(self) -> dict[str, Any] | None:
        if not self._keeps_state or not self._done:
            return None
        if self._data_state is not None:
            return self._data_state
        state: dict[str, Any] = self._loader.dataset.state_dict()  # type: ignore[attr-defined]
        return state

    def load_rank_state(self, state: dict[str, Any]) -> None:
        if self._keeps_state:
            self._data_state = state

    @property
    def _keeps_state(self) -> bool:
        """Whether the data set can say, and be told, how far it is."""
        data = self._loader.dataset
        able = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        return isinstance(data, IterableDataset) and able and self._loader.num_workers == 0

    def _key(self) -> tuple[int, int]:
        return self._epoch, 0

    def _next_epoch(self) -> None:
        self._epoch, self._done, self._data_state = self._epoch + 1, 0, None

    def _rest_of_epoch(self) -> Iterator[Any]:
        for owner in (self._loader.sampler, self._loader.batch_sampler, self._loader.dataset):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
        first = self._go_on()
        for number, batch in enumerate(self._started(), first):
            if number >= self._done:
                self._done = number + 1
                yield batch

    def _go_on(self) -> int:
        """Put the data set where it was; return the number of the batch that it gives next."""
        if self._data_state is not None:
            self._loader.dataset.load_state_dict(self._data_state)  # type: ignore[attr-defined]
            self._data_state = None
            return self._done
        if self._done:
            log.warning(
                "%s is read again from the start of its epoch, and %d batches that were trained are thrown "
                "away: this is right only if its order is the same as before.",
                type(self._loader.dataset).__name__,
                self._done,
            )
        return 0

    def _load(self, state: dict[str, Any]) -> None:
        if not {"epoch", "batches"} <= state.keys():
            raise CheckpointError(
                "The checkpoint's data loader had no sampler of its own, and this one has.",
                hint="Load the data as in the run that wrote the checkpoint.",
            )
        ranks = state.get("world_size", self._world_size)
        if state["batches"] and ranks != self._world_size:
            raise MismatchError(
                f"{ranks} ranks had read {state['batches']} batches each of {type(self.dataset).__name__}, "
                f"whose order is its own; {self._world_size} ranks can't take over from there.",
                hint=f"Go on with {ranks} ranks, or use map-style data without a sampler of your own.",
            )
        self._epoch, self._done, self._data_state = state["epoch"], state["batches"], None
