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
    """Return whether reading a sample may draw random numbers: not if `data.deterministic` is true."""
    if type(data) is TensorDataset or getattr(data, "deterministic", False):
        return False
    parts = _parts(data)
    return not parts or any(draws(part) for part in parts)


def reads_batches(data: Any) -> bool:
    """Return whether a data set reads a whole batch at once, by a `__getitems__` of its own.

    torch's containers and classes that inherit from them have the method, too, but only pass it on.
    """
    if not callable(getattr(data, "__getitems__", None)):
        return False
    parts = _passed_on(data)
    return not parts or any(reads_batches(part) for part in parts)


def _parts(data: Any) -> Sequence[Any]:
    """Return the data sets whose samples one of torch's containers gives; none for another data set."""
    if type(data) is Subset:
        return [data.dataset]
    if type(data) is ConcatDataset:
        return data.datasets
    if type(data) is StackDataset:
        return list(data.datasets.values() if isinstance(data.datasets, dict) else data.datasets)
    return []


def _passed_on(data: Any) -> Sequence[Any]:
    """Return the data sets to which a data set passes its `__getitems__` on, by torch's method."""
    method = getattr(type(data), "__getitems__", None)
    if method is Subset.__getitems__:
        return [data.dataset]
    return _parts(data)


class DatasetProxy:
    """Passes all attributes but `own_names` on to the data set `_inner`, to read and to set.

    A `worker_init_fn` of the user finds the proxy in `get_worker_info().dataset`, and may open files in it.
    """

    own_names: tuple[str, ...] = ("_inner",)

    def __getattr__(self, name: str) -> Any:
        if name in self.own_names:  # Not set yet: pickle is copying the proxy to a worker.
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.own_names:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)


class SeededSamples(DatasetProxy, Dataset[Any]):
    """Reads samples of `inner` by keys (index, epoch, ...), and seeds the generators from each key first.

    In the rank's process the generators are restored afterwards. With `__getitems__`, `inner` reads a whole
    batch at once. The samples of the batch then share the seed of the first key.
    """

    own_names = ("_inner", "_seed")

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner, self._seed = inner, seed

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> Sequence[Any]:
        if get_worker_info() is not None:
            return self._read(keys)
        with rng.preserved():
            return self._read(keys)

    def _read(self, keys: Sequence[Key]) -> Sequence[Any]:
        if not reads_batches(self._inner):
            return [self._read_one(key) for key in keys]
        self._seed_from(keys[0])
        samples: Sequence[Any] = self._inner.__getitems__([index for index, *_ in keys])
        return samples

    def _read_one(self, key: Key) -> Any:
        self._seed_from(key)
        if hasattr(self._inner, "__getitems__"):  # as torch: a class over Subset may have another __getitem__
            return self._inner.__getitems__([key[0]])[0]
        return self._inner[key[0]]

    def _seed_from(self, key: Key) -> None:
        rng.seed_sample(rng.derive(self._seed, "sample", *key))
