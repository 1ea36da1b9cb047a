"""Random augmentation: the draws of a sample follow from seed, epoch and sample alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from slurmddp.training import rng
from slurmddp.training.data.distributed_loader import DistributedLoader
from slurmddp.training.data.seeding import draws, reads_batches
from support.loaders import Augmented, loader_of

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")  # a fork beside threads


class ByTheBatch(Augmented):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Deterministic(Augmented):
    deterministic = True


def make(data: Augmented | None = None, *, batch_size: int = 4, **options: Any) -> DistributedLoader:
    shuffle = "sampler" not in options
    return loader_of(data or Augmented(), batch_size=batch_size, shuffle=shuffle, drop_last=True, **options)


Sample = tuple[float, ...]


def read(loader: DistributedLoader) -> list[list[Sample]]:
    return [[tuple(sample.tolist()) for sample in batch] for batch in loader]


def by_index(batches: list[list[Sample]]) -> dict[int, Sample]:
    return {int(sample[0]): sample for batch in batches for sample in batch}


@pytest.mark.parametrize(
    "options", [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_workers_do_not_matter(options: dict[str, Any]) -> None:
    plain, others = make(), make(**options)
    epochs = [read(plain) for _ in range(2)]
    assert [read(others) for _ in range(2)] == epochs
    assert by_index(epochs[0])[3] != by_index(epochs[1])[3], "each epoch draws again"
    assert len({sample[1:] for batch in epochs[0] for sample in batch}) == 24


def test_another_seed_gives_other_draws() -> None:
    one, other = (by_index(read(make(seed=seed))) for seed in (7, 8))
    assert one.keys() == other.keys()
    assert not {drawn for sample in one.values() for drawn in sample[1:]} & {
        drawn for sample in other.values() for drawn in sample[1:]
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_world_size_does_not_matter(ranks: int) -> None:
    whole = by_index(read(make()))
    parts = [by_index(read(make(ranks=ranks, rank=rank, batch_size=2))) for rank in range(ranks)]
    assert {index: sample for part in parts for index, sample in part.items()} == whole


def test_reading_a_sample_does_not_change_the_ranks_generators() -> None:
    rng.seed_everything(1)
    undisturbed = [torch.rand(()).item(), random.random(), np.random.rand()]
    rng.seed_everything(1)
    read(make())
    assert [torch.rand(()).item(), random.random(), np.random.rand()] == undisturbed


def test_a_sample_that_can_not_be_read_does_not_change_the_ranks_generators() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise ZeroDivisionError

    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        read(make(Broken()))
    assert torch.equal(torch.get_rng_state(), before)


def test_deterministic_data_is_not_seeded() -> None:
    rng.seed_everything(1)
    expected = torch.rand(24).tolist()
    rng.seed_everything(1)
    batches = read(make(Deterministic()))
    assert [sample[1] for batch in batches for sample in batch] == pytest.approx(expected)


def test_getitems_still_reads_whole_batches() -> None:
    first, again = make(ByTheBatch()), make(ByTheBatch(), num_workers=1)
    batches = read(first)
    assert batches == read(again)
    assert len({sample[1] for batch in batches for sample in batch}) == 24


class NamedSubset(Subset[Any]):
    """A class of a user over Subset."""


@pytest.mark.parametrize(
    "contain",
    [
        lambda data: Subset(data, range(24)),
        lambda data: Subset(Subset(data, range(24)), range(24)),
        lambda data: NamedSubset(data, range(24)),
        lambda data: ConcatDataset([Subset(data, range(12)), Subset(data, range(12, 24))]),
        lambda data: StackDataset(data, Deterministic()),
    ],
)
def test_containers_of_torch_pass_on_how_their_data_are_read(contain: Callable[[Any], Any]) -> None:
    """Read one by one, draws follow from the sample; in batches, samples of a batch share one seed."""

    def first_parts(batches: Any) -> dict[int, Sample]:
        samples = [batch[0] if isinstance(batch, list) else batch for batch in batches]
        return {int(sample[0]): tuple(sample.tolist()) for batch in samples for sample in batch}

    whole = first_parts(make(contain(Augmented())))
    ranks = [first_parts(make(contain(Augmented()), ranks=2, rank=rank, batch_size=2)) for rank in range(2)]
    assert ranks[0] | ranks[1] == whole
    assert len({sample[1] for sample in whole.values()}) == 24
    assert draws(contain(Deterministic())) == isinstance(contain(Deterministic()), NamedSubset)
    is_concatenation = isinstance(contain(Augmented()), ConcatDataset)
    assert reads_batches(contain(ByTheBatch())) != is_concatenation


def test_a_sample_that_is_drawn_twice_is_augmented_differently() -> None:
    batches = read(make(Augmented(3), sampler=WeightedRandomSampler([1.0] * 3, 24)))
    assert len({sample[1] for batch in batches for sample in batch}) == 24


def open_in_worker(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Opened | TensorDataset)
    info.dataset.opened_by = worker_id  # type: ignore[union-attr]


class Opened(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.opened_by if self.opened_by is not None else -1])


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_a_users_worker_init_fn_sees_the_data_set(context: str, workers: int) -> None:
    loader = make(
        Opened(6),
        batch_size=3,
        num_workers=workers,
        worker_init_fn=open_in_worker,
        multiprocessing_context=context,
    )
    assert [[sample[1] for sample in batch] for batch in read(loader)] == [[0.0] * 3, [workers - 1.0] * 3]
    assert isinstance(loader.dataset, Opened)
    tensors = TensorDataset(torch.arange(6.0))
    assert read(make(tensors, num_workers=1, worker_init_fn=open_in_worker))
