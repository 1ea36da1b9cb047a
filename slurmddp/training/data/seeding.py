"""Randomness that belongs to a sample: augmentation follows from (seed, epoch, sample) alone.

Drawn from the generators of a process, it would depend on how many ranks and loader workers there are and on
what they fetched before, so a run that was resumed in the middle of an epoch would see other samples than an
undisturbed one. The generators of python, torch and NumPy are seeded again before each sample is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, Sampler, TensorDataset, get_worker_info

from slurmddp.training import rng
from slurmddp.training.data.permutation import DistributedOrder

Key = tuple[int, ...]


def draws(data: Any) -> bool:
    """Whether reading a sample may draw random numbers; a data set whose `deterministic` is true says no."""
    return type(data) is not TensorDataset and not getattr(data, "deterministic", False)


class RankSampler(Sampler[Any]):
    """This rank's part of an order; cut for `even` so that all ranks get equally many samples.

    With `keyed` it yields keys for a `SeededSamples` in place of indices.
    """

    def __init__(self, order: DistributedOrder, *, world_size: int, even: bool, keyed: bool) -> None:
        self._order, self._world_size = order, world_size
        self.even, self._keyed = even, keyed

    def __len__(self) -> int:
        return (self._order.n - self._order.position) // self._world_size if self.even else len(self._order)

    def __iter__(self) -> Iterator[Any]:
        items = self._order.keyed() if self._keyed else iter(self._order)
        return (item for item, _ in zip(items, range(len(self)), strict=False)) if self.even else items


class DatasetProxy:
    """A wrapper whose other attributes are those of `_inner`, read and set.

    A worker's own start finds the data set in `get_worker_info().dataset` and may open files in it.
    """

    own_names: tuple[str, ...] = ("_inner",)

    def __getattr__(self, name: str) -> Any:
        if name in self.own_names:  # Not there yet: it is being copied to a worker.
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.own_names:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)


class SeededSamples(DatasetProxy, Dataset[Any]):
    """Reads samples of `inner` by (index, epoch, ...), each after seeding the generators from that key.

    In the rank's own process the generators are put back afterwards. Samples that `inner` reads by the batch,
    with `__getitems__`, share the seed of the first of them. To everybody else it looks like `inner`.
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
        with rng.aside():
            return self._read(keys)

    def _read(self, keys: Sequence[Key]) -> Sequence[Any]:
        by_the_batch = getattr(self._inner, "__getitems__", None)
        if by_the_batch is None:
            return [self._read_one(key) for key in keys]
        self._seed_from(keys[0])
        found: Sequence[Any] = by_the_batch([index for index, *_ in keys])
        return found

    def _read_one(self, key: Key) -> Any:
        self._seed_from(key)
        return self._inner[key[0]]

    def _seed_from(self, key: Key) -> None:
        rng.seed_sample(rng.derive(self._seed, "sample", *key))
