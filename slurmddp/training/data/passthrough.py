"""Keep the order of a user's sampler: count the batches that the loop received, and skip them at a resume.

The sampler divides the samples among the ranks itself. `set_epoch(epoch)` is called at the start of each
epoch on the sampler, the batch sampler and the data set that have it. After a resume the sampler starts the
epoch again, and the trained batches are dropped. So the samples are the same only if the sampler gives the
same order again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import CheckpointError, MismatchError
from slurmddp.training.data.distributed_loader import DistributedLoader

log = logging.getLogger(__name__)


class PassthroughLoader(DistributedLoader):
    """A loader whose sampler, or whose iterable data set, chooses the order."""

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, seed: int, info: RankInfo, accumulate: int
    ) -> None:
        super().__init__(loader, device, seed, info, accumulate)
        self._to_epoch(0)

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

    def _next_epoch(self) -> None:
        self._to_epoch(self._epoch + 1)

    def _to_epoch(self, epoch: int) -> None:
        self._epoch, self._done = epoch, 0

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
                "The checkpoint's data loader had no sampler of the user, and this data loader has one.",
                hint="Load the data as in the run that wrote the checkpoint.",
            )
        if state["batches"]:
            self._require_ranks(state.get("world_size", self._world_size), state["batches"])
        self._epoch, self._done = state["epoch"], state["batches"]

    def _require_ranks(self, ranks: int, batches: int) -> None:
        """Raise MismatchError unless as many ranks as now had read the first batches of the epoch."""
        if ranks != self._world_size:
            raise MismatchError(
                f"{ranks} ranks had read {batches} batches each of {type(self.dataset).__name__}; "
                f"{self._world_size} rank(s) can't resume in the middle of its epoch.",
                hint=f"Resume with {ranks} ranks, or use map-style data without a sampler of your own.",
            )
