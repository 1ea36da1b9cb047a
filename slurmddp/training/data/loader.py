"""Turn a torch DataLoader into a loader that gives each rank its part and resumes where training stopped.

Each `for` over such a loader is one epoch, with its own order. The first `for` after a resume yields the rest
of the interrupted epoch. A batch counts as trained when the loop receives it, not when a loader worker
fetches it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError
from slurmddp.settings.spec import GlobalBatch
from slurmddp.training.data.distributed_loader import DistributedLoader, rebuild
from slurmddp.training.data.iterable import IterableLoader
from slurmddp.training.data.passthrough import PassthroughLoader
from slurmddp.training.data.sampler import RankSampler
from slurmddp.training.data.seeding import SeededSamples, draws
from slurmddp.training.data.weighted import WeightedSampler
from slurmddp.training.data.whole_batches import WholeBatches, as_it_is, stacks_tensors

log = logging.getLogger(__name__)


class SampledLoader(DistributedLoader):
    """A loader over map-style data, which a `RankSampler` divides among the ranks."""

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: RankSampler,
        device: torch.device,
        info: RankInfo,
        *,
        accumulate: int,
        keep_global_batch: bool,
    ) -> None:
        super().__init__(loader, device, sampler.seed, info, accumulate)
        self._sampler = sampler
        self._keep_global_batch = keep_global_batch

    @property
    def epoch(self) -> int:
        return self._sampler.epoch

    def __len__(self) -> int:
        return self._batches(self._sampler.samples_per_epoch())

    @property
    def remaining(self) -> int:
        return self._batches(self._sampler.samples_left())

    def _batches(self, samples: int) -> int:
        return -(-samples // (self._loader.batch_size or 1))

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def _next_epoch(self) -> None:
        self._sampler.seek(self._sampler.epoch + 1, 0)

    def _rest_of_epoch(self) -> Iterator[Any]:
        advance = self._sampler.advance
        samples = (self._loader.batch_size or 1) * self._world_size
        for batch in self._start_reading():
            advance(samples)
            yield batch

    def _load(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        samples_before = state["global_batch"]
        samples_now = self._sampler.global_batch_size
        if samples_before == samples_now:
            return

        if self._keep_global_batch:
            self._share(samples_before)
        else:
            text = "An optimizer step had %d samples when the checkpoint was written, and has %d now."
            log.warning(text, samples_before, samples_now)

    def _share(self, samples: int) -> None:
        """Set `accumulate`, and the batch size if necessary, so that a step has `samples` samples."""
        largest = self._loader.batch_size
        batch_size, self._accumulate = GlobalBatch(samples).share(self._world_size, largest or 1)
        self._sampler.batch_size = batch_size * self._accumulate
        if largest is not None and batch_size != largest:
            self._loader = rebuild(self._loader, batch_size=batch_size)

        log.info(
            "A step still has %d samples: %d rank(s) with %d batch(es) of %d.",
            samples,
            self._world_size,
            self._accumulate,
            batch_size,
        )


def distribute(
    loader: DataLoader[Any],
    *,
    device: torch.device,
    info: RankInfo,
    seed: int,
    accumulate: int = 1,
    even: bool = True,
    keep_global_batch: bool = False,
) -> DistributedLoader:
    """Return a loader with the settings of `loader` that yields this rank's batches.

    Args:
        loader: a DataLoader of torch.
        device: the device for the batches.
        info: this rank.
        seed: the seed for order and random draws, together with the epoch.
        accumulate, even, keep_global_batch: as for `Distributon.setup_dataloader`.

    Raises:
        ConfigError: `loader` is not a DataLoader, or has too few samples for the ranks.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"setup_dataloader was given a {type(loader).__name__}.",
            hint="Give DataLoaders of torch, each of them once.",
        )

    if not _has_known_order(loader):
        if isinstance(loader.dataset, IterableDataset):
            _warn_of_undivided_stream(loader, info)
            return IterableLoader(loader, device, seed, info, accumulate)

        if info.world_size > 1:
            log.warning(
                "%s is not divided among ranks: each rank trains all samples, unless the sampler itself "
                "yields only the samples of its rank.",
                _owner(loader),
            )

        return PassthroughLoader(rebuild(loader), device, seed, info, accumulate)

    data: Any = loader.dataset
    keyed = draws(data)
    sampler = _rank_sampler(
        loader,
        rank=info.rank,
        world_size=info.world_size,
        batch_size=(loader.batch_size or 1) * accumulate,
        seed=seed,
        drop_last=loader.drop_last,
        even=even,
        keyed=keyed,
        checks_size=not keep_global_batch,
    )
    if accumulate > 1:
        _warn_of_incomplete_step(sampler)

    changes: dict[str, Any] = {"dataset": SeededSamples(data, seed) if keyed else data}
    if stacks_tensors(loader):
        changes = {"dataset": WholeBatches(data), "collate_fn": as_it_is}

    return SampledLoader(
        rebuild(loader, **changes, sampler=sampler, generator=torch.Generator()),
        sampler,
        device,
        info,
        accumulate=accumulate,
        keep_global_batch=keep_global_batch,
    )


def _warn_of_undivided_stream(loader: DataLoader[Any], info: RankInfo) -> None:
    """Warn if several readers read an iterable data set that has no method `set_share`.

    Each reader may then yield all samples. The data set may divide itself by the rank and by
    `get_worker_info()`, but that can't be seen from outside.
    """
    readers = info.world_size * max(1, loader.num_workers)
    if readers > 1 and not hasattr(loader.dataset, "set_share"):
        log.warning(
            "%s is iterable and has no method set_share(part, parts). Unless it divides itself by its rank "
            "and by get_worker_info(), each of its %d readers trains all samples. Give it set_share: see "
            "docs/guides/iterable-data.md.",
            type(loader.dataset).__name__,
            readers,
        )


def _warn_of_incomplete_step(sampler: RankSampler) -> None:
    """Warn if the last batches of an epoch don't fill an accumulated optimizer step."""
    left = sampler.samples_after_last_step()
    if left:
        log.warning(
            "An epoch of %d samples is no multiple of a step of %d samples (all ranks, accumulated): %d are "
            "left. Unless your loop calls optimizer.step() after them too, their gradients are added to the "
            "next step. Give the DataLoader drop_last=True to leave these samples out.",
            sampler.n,
            sampler.global_batch_size,
            left,
        )


def _owner(loader: DataLoader[Any]) -> str:
    """Return "The order of the", followed by the class of the batch sampler or sampler of `loader`."""
    sampler = loader.sampler
    if loader.batch_size is None and loader.batch_sampler:
        sampler = loader.batch_sampler
    return f"The order of the {type(sampler).__name__}"


def _rank_sampler(loader: DataLoader[Any], **options: Any) -> RankSampler:
    sampler = loader.sampler
    if isinstance(sampler, WeightedRandomSampler):
        weights = sampler.weights.tolist()
        return WeightedSampler(sampler.num_samples, weights, replacement=sampler.replacement, **options)

    size = len(loader.dataset)  # type: ignore[arg-type]
    return RankSampler(size, shuffle=isinstance(sampler, RandomSampler), **options)


def _has_known_order(loader: DataLoader[Any]) -> bool:
    """Decide whether `loader` reads map-style data in an order that a `RankSampler` can produce.

    These are: in order, shuffled by `shuffle=True`, and drawn by a WeightedRandomSampler.
    """
    has_batch_sampler = loader.batch_size is None and loader.batch_sampler is not None
    if isinstance(loader.dataset, IterableDataset) or has_batch_sampler:
        return False

    sampler = loader.sampler
    if type(sampler) is WeightedRandomSampler:
        return True
    if type(sampler) not in (SequentialSampler, RandomSampler) or getattr(sampler, "replacement", False):
        return False

    return len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
