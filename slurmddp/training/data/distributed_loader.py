"""Define the base class of data loaders: it counts epochs, moves batches, protects workers from signals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from slurmddp.environments.rank_info import RankInfo
from slurmddp.training.data.seeding import show_users_dataset, unwrapped
from slurmddp.training.heartbeat import Heartbeat
from slurmddp.training.rng import derive
from slurmddp.training.stopping.signals import hold_in_worker, signals_held


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a copy of `batch` with all its tensors on `device`, also in nested mappings, lists and tuples.

    Another object with a method `to`, such as a batch of graphs, is replaced by the result of `to(device)`.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)

    return batch


class DistributedLoader:
    """The loader that `Distributon.setup_dataloader` returns; each `for` over it is one epoch.

    `Distributon.save` stores the position of the loader, and `Distributon.load` restores it.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, seed: int, info: RankInfo, accumulate: int
    ) -> None:
        self._loader = loader
        self._device = device
        self._seed = seed
        self._rank = info.rank
        self._world_size = info.world_size
        self._accumulate = accumulate
        self._entered = False
        """Whether a `for` over the loader has begun and has not come to its end."""

        self.progress: Heartbeat | None = None
        """Records the waits for batches, for the watchdog."""
        self.workers_differ = True
        """Whether loader workers of different ranks get different seeds."""

    @property
    def dataset(self) -> Any:
        """The data set of the loader that was given to `setup_dataloader`."""
        return unwrapped(self._loader.dataset)

    @property
    def accumulate(self) -> int:
        """Number of batches per optimizer step. With `keep_global_batch`, a load may change it."""
        return self._accumulate

    @property
    def batch_size(self) -> int | None:
        """Number of samples per rank and batch; None if a batch sampler or the data set forms the batches."""
        return self._loader.batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the running `for`, or of the next `for` if none is running; the first one is 0."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        raise NotImplementedError

    @property
    def remaining(self) -> int:
        """Number of batches of the current epoch that this rank has not received yet."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of one epoch, with all their tensors on this rank's device.

        The first `for` after a `load` yields the rest of the interrupted epoch. `break` ends the
        epoch too: the next `for` begins another epoch.
        """
        # The last `for` was left by `break`, before it came to the line that begins the next epoch.
        if self._entered:
            self._next_epoch()

        self._entered = True
        self._reseed()
        batches = self._rest_of_epoch()
        if self.progress is not None:
            batches = self.progress.batches(batches, self._device)

        # The DataLoader yields tensors on the CPU, so on the CPU there is nothing to move.
        if self._device.type == "cpu":
            yield from batches
        else:
            for batch in batches:
                yield to_device(batch, self._device)

        self._next_epoch()
        self._entered = False

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the position that is the same on all ranks."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        self._load(state)
        self._entered = False

    def rank_state(self) -> dict[str, Any] | None:
        """Return the part of the position that differs by rank; None if `state_dict` is all of it."""
        return None

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `rank_state`; call it after `load_state_dict`."""

    def check_rank_states(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Check whether this loader can resume from a checkpoint.

        Args:
            states: the results of `rank_state` of all ranks that wrote the checkpoint.

        Raises:
            MismatchError: it can't, for example because the number of ranks differs.
        """

    def mark(self) -> tuple[Any, Any]:
        """Return the current position in the data, an argument for `go_back`."""
        return self.state_dict(), self.rank_state()

    def go_back(self, mark: tuple[Any, Any]) -> None:
        """Return to a position that `mark` has returned. Batches after this position count as not trained."""
        self.load_state_dict(mark[0])
        if mark[1] is not None:
            self.load_rank_state(mark[1])

    def _reseed(self) -> None:
        # Seed the generator from which the DataLoader draws the seeds of its workers at the begin of each
        # epoch. They then depend on the epoch only, and not on how often training was resumed.
        if self._loader.generator is not None:
            rank = self._rank if self.workers_differ else 0
            self._loader.generator.manual_seed(derive(self._seed, "loader", rank, self.epoch))

    def _start_reading(self) -> Iterator[Any]:
        """Start the loader workers, if there are any, and return the iterator over the batches."""
        with signals_held():
            return iter(self._loader)

    def _next_epoch(self) -> None:
        raise NotImplementedError

    def _rest_of_epoch(self) -> Iterator[Any]:
        raise NotImplementedError

    def _load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def rebuild(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a DataLoader with the settings of `loader`, except for `changes`.

    Its workers ignore stop signals (see `hold_in_worker`).
    """
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context",
                     "persistent_workers", "prefetch_factor")
    }  # fmt: skip

    # If `loader` is a result of `rebuild`, its function is wrapped already.
    init_fn = loader.worker_init_fn
    options["worker_init_fn"] = init_fn if isinstance(init_fn, _WorkerStart) else _WorkerStart(init_fn)

    has_batch_sampler = loader.batch_size is None and loader.batch_sampler is not None
    if has_batch_sampler:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            options["sampler"] = loader.sampler

    options["generator"] = loader.generator or torch.Generator()
    return DataLoader(**({"dataset": loader.dataset} | options | changes))


class _WorkerStart:
    """The `worker_init_fn` of all loaders: it prepares a worker, and then calls the user's function.

    It is a class and no closure, so that it can be pickled for workers that are spawned.

    Args:
        then: the `worker_init_fn` of the user, or None.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        hold_in_worker(worker_id)
        show_users_dataset()
        if self._then is not None:
            self._then(worker_id)
