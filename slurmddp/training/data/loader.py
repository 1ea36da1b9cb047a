"""Data loaders that know how far they are: each rank's own part, on its device, going on after a resume.

Every `for` over such a loader is one epoch, in an order of its own; only the first one after a resume is the
rest of the epoch that was interrupted. What counts as done is what the loop was handed, not what loader
workers have fetched ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError
from slurmddp.spec import GlobalBatch
from slurmddp.training.data.base import DistributedLoader, rebuild, to_device
from slurmddp.training.data.passthrough import PassthroughLoader, StreamLoader
from slurmddp.training.data.permutation import DistributedOrder
from slurmddp.training.data.seeding import RankSampler, SeededSamples, draws
from slurmddp.training.data.weighted import WeightedOrder

__all__ = ["PassthroughLoader", "DistributedLoader", "OrderedLoader", "distribute", "to_device"]

log = logging.getLogger(__name__)


class OrderedLoader(DistributedLoader):
    """A loader over map-style data in the order that `DistributedOrder` gives."""

    def __init__(
        self,
        loader: DataLoader[Any],
        order: DistributedOrder,
        device: torch.device,
        info: RankInfo,
        *,
        accumulate: int,
        keep_global_batch: bool,
    ) -> None:
        super().__init__(loader, device, order.seed, info, accumulate)
        self._order, self._keep = order, keep_global_batch

    @property
    def epoch(self) -> int:
        return self._order.epoch

    def __len__(self) -> int:
        return self._batches_between(0, self._order.end_from(0))

    @property
    def remaining(self) -> int:
        return self._batches_between(self._order.position, self._order.end)

    def _batches_between(self, start: int, end: int) -> int:
        """Return in how many batches this rank gets its part of the positions `start` to `end`."""
        if isinstance(self._loader.sampler, RankSampler) and self._loader.sampler.even:
            samples = (end - start) // self._world_size
        else:
            samples = len(range(start + self._rank, end, self._world_size))
        return -(-samples // (self._loader.batch_size or 1))

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def _key(self) -> tuple[int, int]:
        return self._order.epoch, self._order.position

    def _next_epoch(self) -> None:
        self._order.seek(self._order.epoch + 1, 0)

    def _rest_of_epoch(self) -> Iterator[Any]:
        for batch in self._started():
            self._order.advance((self._loader.batch_size or 1) * self._world_size)
            yield batch

    def _load(self, state: dict[str, Any]) -> None:
        self._order.load_state_dict(state)
        samples = state.get("global_batch", self._order.global_batch_size)
        if samples == self._order.global_batch_size:
            return
        if self._keep:
            self._share(samples)
        else:
            log.warning(
                "An optimizer step had %d samples when the checkpoint was written, and has %d now.",
                samples,
                self._order.global_batch_size,
            )

    def _share(self, samples: int) -> None:
        """Let a step have `samples` samples on all ranks together."""
        most = self._loader.batch_size
        size, self._accumulate = GlobalBatch(samples).share(self._world_size, most or 1)
        self._order.set_batch_size(size * self._accumulate)
        if most is not None and size != most:
            self._loader = rebuild(self._loader, batch_size=size)
        log.info(
            "A step keeps its %d samples: %d rank(s) with %d batch(es) of %d.",
            samples,
            self._world_size,
            self._accumulate,
            size,
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
    """Return a loader like `loader` that gives this rank its part; see `Distributon.setup_dataloader`."""
    if not _has_known_order(loader):
        if info.world_size > 1 and not hasattr(loader.dataset, "set_share"):
            log.warning("%s is not divided among ranks: it has to look at the rank itself.", _owner(loader))
        if isinstance(loader.dataset, IterableDataset):
            return StreamLoader(loader, device, seed, info, accumulate)
        return PassthroughLoader(rebuild(loader), device, seed, info, accumulate)
    order = _order_of(loader, info, seed, accumulate)
    even = even and not loader.drop_last and info.world_size > 1
    if even and order.n < info.world_size:
        raise ConfigError(
            f"The data set has {order.n} samples for {info.world_size} ranks, so no rank gets a batch.",
            hint="Use fewer ranks or more data; even=False gives each sample to one rank, others get none.",
        )
    data: Any = loader.dataset
    keyed = draws(data)
    dealt = RankSampler(
        order,
        world_size=info.world_size,
        even=even,
        keyed=keyed,
    )
    own = rebuild(
        loader,
        dataset=SeededSamples(data, seed) if keyed else data,
        sampler=dealt,
        generator=torch.Generator(),
    )
    return OrderedLoader(own, order, device, info, accumulate=accumulate, keep_global_batch=keep_global_batch)


def _owner(loader: DataLoader[Any]) -> str:
    if isinstance(loader.dataset, IterableDataset):
        return f"Iterable data ({type(loader.dataset).__name__})"
    own = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else loader.sampler
    return f"The order of the {type(own or loader.sampler).__name__}"


def _order_of(loader: DataLoader[Any], info: RankInfo, seed: int, accumulate: int) -> DistributedOrder:
    options: dict[str, Any] = {
        "rank": info.rank,
        "world_size": info.world_size,
        "batch_size": (loader.batch_size or 1) * accumulate,
        "seed": seed,
        "drop_last": loader.drop_last,
    }
    sampler = loader.sampler
    if isinstance(sampler, WeightedRandomSampler):
        weights = sampler.weights.tolist()
        return WeightedOrder(sampler.num_samples, weights, replacement=sampler.replacement, **options)
    size = len(loader.dataset)  # type: ignore[arg-type]
    return DistributedOrder(size, shuffle=isinstance(sampler, RandomSampler), **options)


def _has_known_order(loader: DataLoader[Any]) -> bool:
    """Whether the loader draws in order, shuffled as `DataLoader(data, shuffle=...)` does, or by weights."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    if loader.batch_size is not None and type(loader.batch_sampler) is not BatchSampler:
        return False
    if loader.batch_size is None and loader.batch_sampler is not None:
        return False
    sampler = loader.sampler
    if type(sampler) is WeightedRandomSampler:
        return True
    if type(sampler) not in (SequentialSampler, RandomSampler) or getattr(sampler, "replacement", False):
        return False
    return len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
