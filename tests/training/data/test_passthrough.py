"""Samplers of the user: they keep their order, get each epoch, and resume within an epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from slurmddp.errors import CheckpointError, MismatchError
from slurmddp.training import rng
from slurmddp.training.data.distributed_loader import DistributedLoader
from slurmddp.training.data.passthrough import PassthroughLoader
from support.loaders import Augmented, epoch_of, loader_of

SAMPLES = 12


class Numbers(Dataset[Any]):
    """Numbers that are others in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index + 1000 * self.epoch


class Turned:
    """An order that begins one sample later in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % SAMPLES for index in range(SAMPLES)])


class TurnedBatches(Turned):
    def __len__(self) -> int:
        return SAMPLES // 3

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        return iter(BatchSampler(super().__iter__(), 3, drop_last=False))


def make(data: Dataset[Any] | None = None, **options: Any) -> DistributedLoader:
    if "batch_sampler" not in options:
        options["batch_size"] = 3
    loader = loader_of(data or Numbers(), **options)
    assert isinstance(loader, PassthroughLoader)
    return loader


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_d8_set_epoch_is_called_on_samplers_and_data(kind: str) -> None:
    loader = make(**{kind: Turned() if kind == "sampler" else TurnedBatches()})
    assert epoch_of(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert epoch_of(loader)[3] == [1010, 1011, 1000]
    assert len(loader) == 4


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resume_gives_the_rest_of_the_epoch_and_the_next_one(
    stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole, stopped, resumed = (make(sampler=Turned()) for _ in range(3))
    epochs = [epoch_of(whole) for _ in range(3)]
    epoch_of(stopped)
    walk = iter(stopped)
    assert [next(walk).tolist() for _ in range(stop)] == epochs[1][:stop]
    resumed.load_state_dict(stopped.state_dict())
    assert not caplog.text
    assert epoch_of(resumed) == epochs[1][stop:]
    assert f"Numbers is read again from the start of its epoch, and {stop} batches" in caplog.text
    assert epoch_of(resumed) == epochs[2]


class Permuted(Turned):
    """Draws its order from the global generators, and reads it one by one."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        yield from (int(index) for index in self.draw(SAMPLES))


def _seeded() -> torch.Generator:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    return generator


DRAWN: dict[str, Callable[[], dict[str, Any]]] = {
    "subset": lambda: {"sampler": SubsetRandomSampler(range(2, SAMPLES))},
    "with replacement": lambda: {"sampler": RandomSampler(range(SAMPLES), replacement=True)},
    "some": lambda: {"sampler": RandomSampler(range(SAMPLES), num_samples=10)},
    "of a generator": lambda: {"sampler": SubsetRandomSampler(range(SAMPLES), _seeded())},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SAMPLES)), 3, False)},
    "batches of a generator": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(SAMPLES), generator=_seeded()), 3, False)
    },
    "lists": lambda: {"sampler": BatchSampler(RandomSampler(range(SAMPLES)), 3, False), "batch_size": None},
    "torch": lambda: {"sampler": Permuted(torch.randperm)},
    "numpy": lambda: {"sampler": Permuted(np.random.permutation)},
    "python": lambda: {"sampler": Permuted(lambda size: random.sample(range(size), size))},
}


class Lists(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_drawn_order_is_the_same_after_a_resume(kind: str, workers: int) -> None:
    """The training draws numbers too; a stop in the second epoch is resumed twice by new processes."""

    def loader() -> DistributedLoader:
        options = DRAWN[kind]()
        if "batch_sampler" not in options:
            options.setdefault("batch_size", 3)
        return loader_of(Lists(), num_workers=workers, **options)

    def trained(loader: DistributedLoader, batches: int) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < batches:
            for batch in loader:
                seen.append([batch.tolist(), torch.rand(1).item(), random.random()])
                if len(seen) == batches:
                    return seen
        return seen

    rng.seed_everything(1)
    whole = trained(loader(), 10)
    rng.seed_everything(1)
    stopped, seen = loader(), []
    for batches in (5, 1, 4):
        seen += trained(stopped, batches)
        state, rank_state, generators = stopped.state_dict(), stopped.rank_state(), rng.capture()
        rng.seed_everything(2)
        stopped = loader()
        stopped.load_state_dict(state)
        if rank_state is not None:
            stopped.load_rank_state(rank_state)
        rng.restore(generators)
    assert seen == whole


def test_other_ranks_can_resume_only_between_epochs() -> None:
    stopped, resumed = make(ranks=2, sampler=Turned()), make(sampler=Turned())
    resumed.load_state_dict(stopped.state_dict())
    next(walk := iter(stopped))
    with pytest.raises(MismatchError, match=r"2 rank\(s\) had trained 1 batch\(es\) each of Numbers"):
        resumed.load_state_dict(stopped.state_dict())
    del walk


def test_a_position_without_a_users_sampler_is_refused() -> None:
    with pytest.raises(CheckpointError, match="a sampler of your own or iterable data"):
        make(sampler=Turned()).load_state_dict(loader_of(range(SAMPLES)).state_dict())


@pytest.mark.parametrize(
    ("kind", "owner"),
    [("sampler", "The order of the Turned is"), ("batch_sampler", "The order of the TurnedBatches is")],
)
def test_an_undivided_order_is_warned_of_on_several_ranks(
    kind: str, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    order = Turned() if kind == "sampler" else TurnedBatches()
    make(**{kind: order})
    assert not caplog.text
    make(ranks=2, **{kind: order})
    assert f"{owner} not divided among ranks" in caplog.text


class OwnShuffle(RandomSampler):
    pass


class OwnSteps(SequentialSampler):
    pass


@pytest.mark.parametrize(
    "sampler",
    [
        [3, 1, 2, 0, 5, 4],
        SequentialSampler(range(7)),
        RandomSampler(range(SAMPLES), num_samples=7),
        RandomSampler(range(7)),
        RandomSampler(range(SAMPLES), replacement=True),
        OwnShuffle(range(SAMPLES)),
        OwnSteps(range(SAMPLES)),
    ],
    ids=[
        "a list",
        "the first seven",
        "any seven",
        "the first seven, shuffled",
        "some twice",
        "shuffle",
        "steps",
    ],
)
def test_d8_a_special_sampler_keeps_its_order(sampler: Any) -> None:
    torch.manual_seed(5)
    expected = list(sampler)
    torch.manual_seed(5)
    assert [number for batch in epoch_of(make(sampler=sampler)) for number in batch] == expected


@pytest.mark.filterwarnings("default::DeprecationWarning")  # a fork beside threads
def test_draws_of_workers_follow_from_seed_epoch_and_rank() -> None:
    places = [{"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1, "ranks": 2, "rank": 1}]
    first, again, *others = (
        make(Augmented(SAMPLES), sampler=Turned(), num_workers=1, **place) for place in places
    )
    epochs = [epoch_of(first) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [epoch_of(again) for _ in range(2)] == epochs
    assert all(epoch_of(other) != epochs[0] for other in others)
