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
    """Decide whether reading a sample may draw random numbers: not if `data.deterministic` is true."""
    if type(data) is TensorDataset or getattr(data, "deterministic", False):
        return False

    parts = _parts(data)
    return not parts or any(draws(part) for part in parts)


def reads_batches(data: Any) -> bool:
    """Decide whether a data set defines itself how to read a whole batch at once, by `__getitems__`.

    torch's containers, and classes that inherit from them, have the method too, but only pass the call on.
    """
    if not callable(getattr(data, "__getitems__", None)):
        return False

    parts = _passed_on(data)
    return not parts or any(reads_batches(part) for part in parts)


def _parts(data: Any) -> Sequence[Any]:
    """Return the data sets inside one of torch's containers; none for another data set."""
    if type(data) is Subset:
        return [data.dataset]
    if type(data) is ConcatDataset:
        return data.datasets
    if type(data) is StackDataset:
        stacked = data.datasets.values() if isinstance(data.datasets, dict) else data.datasets
        return list(stacked)

    return []


def _passed_on(data: Any) -> Sequence[Any]:
    """Return the data sets to which torch's `__getitems__` passes a call on; none for another method."""
    method = getattr(type(data), "__getitems__", None)
    if method is Subset.__getitems__:
        return [data.dataset]

    return _parts(data)


class DatasetWrapper:
    """The base of data sets that read a user's data set, `inner`; the user's code never meets the wrapper."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)


def unwrapped(data: Any) -> Any:
    """Return the data set of the user."""
    if isinstance(data, DatasetWrapper):
        return data._inner
    return data


def show_users_dataset() -> None:
    """Let `get_worker_info().dataset` be the data set of the user, in a loader worker.

    A `worker_init_fn` may open files in that data set, share it out, or ask for its class.
    """
    worker = get_worker_info()
    if worker is not None:
        # torch refuses plain assignments to the worker's information.
        object.__setattr__(worker, "dataset", unwrapped(worker.dataset))


class SeededSamples(DatasetWrapper, Dataset[Any]):
    """Read samples of `inner` by keys (index, epoch, ...), and seed the generators from each key first.

    In the rank's process the generators are restored afterwards. With `__getitems__`, `inner` reads a whole
    batch at once. The samples of the batch then share the seed of the first key.
    """

    def __init__(self, inner: Any, seed: int) -> None:
        super().__init__(inner)
        self._seed = seed

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> Sequence[Any]:
        # The generators of a loader worker belong to the samples alone.
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
        # torch prefers __getitems__ too: a class over Subset may have another __getitem__.
        if hasattr(self._inner, "__getitems__"):
            return self._inner.__getitems__([index])[0]
        return self._inner[index]

    def _seed_from(self, key: Key) -> None:
        rng.seed_sample(rng.derive(self._seed, "sample", *key))
