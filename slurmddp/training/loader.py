"""Data loaders that know how far they are: each rank's own part, on its device, going on after a resume.

Every `for` over such a loader is one epoch, in an order of its own; only the first one after a resume is the
rest of the epoch that was interrupted. What counts as done is what the loop was handed, not what loader
workers have fetched ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import CheckpointError
from slurmddp.training.order import DistributedOrder
from slurmddp.training.rng import derive
from slurmddp.training.signals import hold_in_worker, signals_held

log = logging.getLogger(__name__)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with all tensors in it, however nested, on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


class DistributedLoader:
    """What `Distributon.setup_dataloader` returns: iterate over it, and ask for its `epoch`."""

    def __init__(self, loader: DataLoader[Any], device: torch.device, seed: int, rank: int) -> None:
        self._loader, self._device = loader, device
        self._seed, self._rank = seed, rank
        self._entered = False

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples per rank and batch."""
        return self._loader.batch_size

    @property
    def epoch(self) -> int:
        """The epoch that the running `for`, or else the next one, goes through; counts from 0."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        if self._entered:  # The last `for` was left by `break`.
            self._next_epoch()
        self._entered = True
        self._reseed()
        for batch in self._rest_of_epoch():
            yield to_device(batch, self._device)
        self._next_epoch()
        self._entered = False

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load(state)
        self._entered = False

    def _reseed(self) -> None:
        # A loader without a generator of its own would draw its workers' seeds from the global one, once
        # more in a resumed run than in an undisturbed one.
        if self._loader.generator is not None:
            self._loader.generator.manual_seed(derive(self._seed, "loader", self._rank, *self._key()))

    def _started(self) -> Iterator[Any]:
        with signals_held():
            return iter(self._loader)

    def _key(self) -> tuple[int, int]:
        raise NotImplementedError

    def _next_epoch(self) -> None:
        raise NotImplementedError

    def _rest_of_epoch(self) -> Iterator[Any]:
        raise NotImplementedError

    def _load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class OrderedLoader(DistributedLoader):
    """A loader over map-style data in the order that `DistributedOrder` gives."""

    def __init__(
        self,
        loader: DataLoader[Any],
        order: DistributedOrder,
        device: torch.device,
        seed: int,
        info: RankInfo,
    ) -> None:
        super().__init__(loader, device, seed, info.rank)
        self._order = order
        self._world_size = info.world_size

    @property
    def epoch(self) -> int:
        return self._order.epoch

    def __len__(self) -> int:
        order, batch = self._order, self._loader.batch_size or 1
        if order.drop_last:
            per_step = order.global_batch_size // (batch * self._world_size)
            return order.n // order.global_batch_size * per_step
        if isinstance(self._loader.sampler, _EvenEnd):
            return -(-(order.n // self._world_size) // batch)
        return -(-len(range(self._rank, order.n, self._world_size)) // batch)

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def _key(self) -> tuple[int, int]:
        return self._order.epoch, self._order.position

    def _next_epoch(self) -> None:
        self._order.seek(self._order.epoch + 1, 0)

    def _rest_of_epoch(self) -> Iterator[Any]:
        self._order.seek(self._order.epoch, self._order.position)
        for batch in self._started():
            self._order.advance((self._loader.batch_size or 1) * self._world_size)
            yield batch

    def _load(self, state: dict[str, Any]) -> None:
        self._order.load_state_dict(state)


class CountedLoader(DistributedLoader):
    """A loader whose order is its owner's (own sampler, iterable data); resuming skips what was done.

    The skipped batches are loaded and thrown away, and the order has to be the same again.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, seed: int, info: RankInfo) -> None:
        super().__init__(loader, device, seed, info.rank)
        self._epoch = self._done = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batches": self._done}

    def _key(self) -> tuple[int, int]:
        return self._epoch, 0

    def _next_epoch(self) -> None:
        self._epoch, self._done = self._epoch + 1, 0

    def _rest_of_epoch(self) -> Iterator[Any]:
        for owner in (self._loader.sampler, self._loader.batch_sampler, self._loader.dataset):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
        for number, batch in enumerate(self._started()):
            if number >= self._done:
                self._done = number + 1
                yield batch

    def _load(self, state: dict[str, Any]) -> None:
        if state.keys() != {"epoch", "batches"}:
            raise CheckpointError(
                "The checkpoint's data loader had no sampler of its own, and this one has.",
                hint="Load the data as in the run that wrote the checkpoint.",
            )
        self._epoch, self._done = state["epoch"], state["batches"]


class _EvenEnd(Sampler[int]):
    """An order cut so that all ranks get equally many samples: at most world_size - 1 are left out."""

    def __init__(self, order: DistributedOrder, world_size: int) -> None:
        self._order, self._world_size = order, world_size

    def __len__(self) -> int:
        return (self._order.n - self._order.position) // self._world_size

    def __iter__(self) -> Iterator[int]:
        left = len(self)
        for index, _ in zip(self._order, range(left), strict=False):
            yield index


def distribute(
    loader: DataLoader[Any],
    *,
    device: torch.device,
    info: RankInfo,
    seed: int,
    accumulate: int = 1,
    even: bool = True,
) -> DistributedLoader:
    """Return a loader like `loader` that gives this rank its part; see `Distributon.setup_dataloader`."""
    if not _has_plain_order(loader):
        if info.world_size > 1 and isinstance(loader.dataset, IterableDataset):
            log.warning("Iterable data is not divided among ranks: the data set has to look at the rank.")
        return CountedLoader(_rebuild(loader), device, seed, info)
    order = DistributedOrder(
        len(loader.dataset),  # type: ignore[arg-type]
        rank=info.rank,
        world_size=info.world_size,
        batch_size=(loader.batch_size or 1) * accumulate,
        seed=seed,
        shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
    )
    cut = even and not loader.drop_last and info.world_size > 1
    sampler = _EvenEnd(order, info.world_size) if cut else order
    generator = torch.Generator()
    return OrderedLoader(_rebuild(loader, sampler=sampler, generator=generator), order, device, seed, info)


def _has_plain_order(loader: DataLoader[Any]) -> bool:
    """Whether the loader draws in order or shuffled, as `DataLoader(data, shuffle=...)` does."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    if loader.batch_size is not None and type(loader.batch_sampler) is not BatchSampler:
        return False
    if loader.batch_size is None and loader.batch_sampler is not None:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler


def _rebuild(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of `loader` with `changes`, whose workers leave the job's signals to their rank."""
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context",
                     "persistent_workers", "prefetch_factor")
    }  # fmt: skip
    options["worker_init_fn"] = _WorkerStart(loader.worker_init_fn)
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    if own_batches:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            options["sampler"] = loader.sampler
    options["generator"] = loader.generator or torch.Generator()
    return DataLoader(loader.dataset, **(options | changes))


class _WorkerStart:
    """Runs in each loader worker before anything else; a class so that spawned workers can get it."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        hold_in_worker(worker_id)
        if self._then is not None:
            self._then(worker_id)
