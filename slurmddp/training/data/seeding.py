"""Let the random draws of a sample (augmentation) follow from (seed, epoch, sample) alone.

The generators of python, torch and NumPy are seeded before each sample is read. Without that, the draws would
depend on the number of ranks and loader workers, and on the samples that they fetched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from slurmddp.training import rng

Key = tuple[int, ...]


def draws(data: Any) -> bool:
    """Decide whether reading a sample may draw random numbers.

    It does not for a TensorDataset and for data sets with `deterministic = True`, also inside of torch's
    containers.
    """
    if type(data) is TensorDataset or getattr(data, "deterministic", False):
        return False

    parts = _parts(data)
    return not parts or any(draws(part) for part in parts)


def reads_batches(data: Any) -> bool:
    """Decide whether a data set has a `__getitems__` of its own, which reads a whole batch at once.

    torch's containers, such as Subset, have this method too, but only pass calls on to the data sets inside.
    So for a container, and for a class that inherits this method, the answer depends on the data sets inside.
    """
    if not callable(getattr(data, "__getitems__", None)):
        return False

    parts = _passed_on(data)
    return not parts or any(reads_batches(part) for part in parts)


def _parts(data: Any) -> Sequence[Any]:
    """Return the data sets inside a Subset, ConcatDataset or StackDataset; empty for other data sets."""
    if type(data) is Subset:
        return [data.dataset]
    if type(data) is ConcatDataset:
        return data.datasets
    if type(data) is StackDataset:
        stacked = data.datasets.values() if isinstance(data.datasets, dict) else data.datasets
        return list(stacked)

    return []


def _passed_on(data: Any) -> Sequence[Any]:
    """Return the data sets that `__getitems__` of torch's container `data` reads; empty for other data."""
    method = getattr(type(data), "__getitems__", None)
    if method is Subset.__getitems__:
        return [data.dataset]

    return _parts(data)


class DatasetWrapper:
    """Base of data sets that read a user's data set, `inner`; `unwrapped` returns that data set."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)


def unwrapped(data: Any) -> Any:
    """Return the user's data set inside a DatasetWrapper, or `data` itself."""
    if isinstance(data, DatasetWrapper):
        return data._inner
    return data


def show_users_dataset() -> None:
    """In a loader worker, make `get_worker_info().dataset` the user's data set instead of the wrapper.

    The user's `worker_init_fn` may open files in that data set, divide it, or check its class.
    """
    worker = get_worker_info()
    if worker is not None:
        # `setattr` of torch's WorkerInfo raises, so call the base class.
        object.__setattr__(worker, "dataset", unwrapped(worker.dataset))


class SeededSamples(DatasetWrapper, Dataset[Any]):
    """The data set `inner`, read by keys (index, epoch, ...); each key first seeds the random generators.

    In the rank's process the generators are restored after the read. If `inner` defines `__getitems__`, which
    reads a whole batch at once, only the first key of the batch is used as a seed.
    """

    def __init__(self, inner: Any, seed: int) -> None:
        super().__init__(inner)
        self._seed = seed

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> Sequence[Any]:
        # In a loader worker nothing else uses the generators, so they need not be restored.
        if get_worker_info() is not None:
            return self._read(keys)

        with rng.preserved():
            return self._read(keys)

    def _read(self, keys: Sequence[Key]) -> Sequence[Any]:
        if not reads_batches(self._inner):
            return [self._read_sample(key) for key in keys]

        self._seed_from(keys[0])
        samples: Sequence[Any] = self._inner.__getitems__([index for index, *_ in keys])
        return samples

    def _read_sample(self, key: Key) -> Any:
        index = key[0]
        self._seed_from(key)
        # Prefer `__getitems__`, as torch's DataLoader does: in a class that inherits from Subset the two
        # methods may return different samples.
        if hasattr(self._inner, "__getitems__"):
            return self._inner.__getitems__([index])[0]
        return self._inner[index]

    def _seed_from(self, key: Key) -> None:
        rng.seed_sample(rng.derive(self._seed, "sample", *key))
