"""Keep the order of a user's sampler: count the batches that the loop received, and skip them at a resume.

The sampler divides the samples among the ranks itself. At the start of each epoch, `set_epoch(epoch)` of the
sampler, the batch sampler and the data set is called, if they have such a method. After a resume the sampler
starts the epoch again, with the states of the generators from the epoch's first start, and the trained
batches are dropped. So the samples are the same only if the sampler gives the same order again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import CheckpointError, MismatchError
from slurmddp.training import rng
from slurmddp.training.data.distributed_loader import DistributedLoader

log = logging.getLogger(__name__)


class PassthroughLoader(DistributedLoader):
    """A loader whose order is chosen by the user's sampler or iterable data set."""

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, seed: int, info: RankInfo, accumulate: int
    ) -> None:
        super().__init__(loader, device, seed, info, accumulate)
        self._at_begin: dict[str, Any] | None = None
        """The states of the generators at the begin of the epoch, before the sampler has drawn an order."""
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
        self._epoch = epoch
        self._done = 0
        self._at_begin = None

    def _rest_of_epoch(self) -> Iterator[Any]:
        for owner in (self._loader.sampler, self._loader.batch_sampler, self._loader.dataset):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)

        batches = self._read_again() if self._done else self._read_first()
        for batch in batches:
            self._done += 1
            yield batch

    def _read_first(self) -> Iterator[Any]:
        """Return an iterator over a new epoch; first store the generators' states for `_read_again`."""
        generators = [generator.get_state() for generator in self._generators()]
        self._at_begin = {"global": rng.capture(), "own": generators}
        return self._start_reading()

    def _read_again(self) -> Iterator[Any]:
        """Return an iterator over the rest of an interrupted epoch, whose trained batches are dropped.

        The epoch starts with the generators in the states of its first start, so that it has the same order.
        """
        self._warn_of_reading_again()
        with rng.preserved():
            if self._at_begin is not None:
                rng.restore(self._at_begin["global"])
                for generator, state in zip(self._generators(), self._at_begin["own"], strict=False):
                    generator.set_state(state)

            batches = self._start_reading()
            for _ in range(self._done):
                next(batches, None)

        return batches

    def _generators(self) -> list[torch.Generator]:
        """Return the `generator` of each sampler of the loader that has one."""
        sampler = self._loader.sampler
        batch_sampler = self._loader.batch_sampler
        samplers = [
            sampler,
            batch_sampler,
            getattr(sampler, "sampler", None),
            getattr(batch_sampler, "sampler", None),
        ]

        # Use the samplers' ids as keys: torch's batch sampler contains the loader's sampler, which is then in
        # the list twice.
        generators = {id(each): getattr(each, "generator", None) for each in samplers}
        return [generator for generator in generators.values() if isinstance(generator, torch.Generator)]

    def _warn_of_reading_again(self) -> None:
        log.warning(
            "%s is read again from the start of its epoch, and %d batches that were trained are skipped. "
            "This is right only if its order is the same as before.",
            type(self.dataset).__name__,
            self._done,
        )

    def rank_state(self) -> dict[str, Any] | None:
        return {"begin": self._at_begin} if self._done else None

    def load_rank_state(self, state: dict[str, Any]) -> None:
        self._at_begin = state["begin"]

    def _load(self, state: dict[str, Any]) -> None:
        if not {"epoch", "batches"} <= state.keys():
            raise CheckpointError(
                "This data loader has a sampler of your own or iterable data, but the data loader in the "
                "checkpoint had neither.",
                hint="Use the data set and the sampler of the run that wrote the checkpoint.",
            )

        if state["batches"]:
            self._require_ranks(state.get("world_size", self._world_size), state["batches"])

        self._to_epoch(state["epoch"])
        self._done = state["batches"]

    def _require_ranks(self, ranks: int, batches: int, also: str = "") -> None:
        """Raise MismatchError if the checkpoint was written by another number of ranks.

        Args:
            ranks: the number of ranks that wrote the checkpoint.
            batches: the number of batches of the epoch that each of them had trained.
            also: a further condition for a resume, which the hint adds to the number of ranks.
        """
        if ranks != self._world_size:
            raise MismatchError(
                f"When the checkpoint was written, {ranks} rank(s) had trained {batches} batch(es) each of "
                f"{type(self.dataset).__name__}; {self._world_size} rank(s) can't resume within an epoch.",
                hint=f"Resume with {ranks} ranks{also}, or use map-style data without a sampler of your own.",
            )
