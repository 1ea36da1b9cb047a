"""Samplers of the user: they keep their order, get each epoch, and resume within an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError
from slurmddp.training.data.base import DistributedLoader
from slurmddp.training.data.loader import distribute
from slurmddp.training.data.passthrough import PassthroughLoader

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


def make(
    ranks: int = 1, data: Dataset[Any] | None = None, seed: int = 4, **options: Any
) -> PassthroughLoader:
    if "batch_sampler" not in options:
        options["batch_size"] = 3
    loader = distribute(
        DataLoader(data or Numbers(), **options),
        device=torch.device("cpu"),
        info=RankInfo(environment="local", rank=0, world_size=ranks, local_world_size=ranks),
        seed=seed,
    )
    assert isinstance(loader, PassthroughLoader)
    return loader


def epoch_of(loader: DistributedLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_set_epoch_is_called_on_samplers_and_data(kind: str) -> None:
    loader = make(**{kind: Turned() if kind == "sampler" else TurnedBatches()})
    assert epoch_of(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert epoch_of(loader)[3] == [1010, 1011, 1000]
    assert len(loader) == 4


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resume_gives_the_rest_of_the_epoch_and_the_next_one(stop: int) -> None:
    whole, stopped, resumed = (make(sampler=Turned()) for _ in range(3))
    epochs = [epoch_of(whole) for _ in range(3)]
    epoch_of(stopped)
    walk = iter(stopped)
    assert [next(walk).tolist() for _ in range(stop)] == epochs[1][:stop]
    resumed.load_state_dict(stopped.state_dict())
    assert epoch_of(resumed) == epochs[1][stop:]
    assert epoch_of(resumed) == epochs[2]


def test_other_ranks_can_resume_only_between_epochs() -> None:
    stopped, resumed = make(ranks=2, sampler=Turned()), make(sampler=Turned())
    resumed.load_state_dict(stopped.state_dict())
    next(walk := iter(stopped))
    with pytest.raises(MismatchError, match="2 ranks had read 1 batches each of Numbers"):
        resumed.load_state_dict(stopped.state_dict())
    del walk


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
        SequentialSampler(range(7)),
        RandomSampler(range(SAMPLES), num_samples=7),
        RandomSampler(range(7)),
        RandomSampler(range(SAMPLES), replacement=True),
        OwnShuffle(range(SAMPLES)),
        OwnSteps(range(SAMPLES)),
    ],
    ids=["the first seven", "any seven", "the first seven, shuffled", "some twice", "shuffle", "steps"],
)
def test_a_special_sampler_of_torch_keeps_its_order(sampler: Any) -> None:
    torch.manual_seed(5)
    expected = list(sampler)
    torch.manual_seed(5)
    assert [number for batch in epoch_of(make(sampler=sampler)) for number in batch] == expected


class Draws(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(())


@pytest.mark.filterwarnings("default::DeprecationWarning")  # a fork beside threads
def test_draws_of_workers_follow_from_seed_and_epoch() -> None:
    first, again, other = (make(data=Draws(), sampler=Turned(), num_workers=1, seed=s) for s in (1, 1, 2))
    epochs = [epoch_of(first) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [epoch_of(again) for _ in range(2)] == epochs
    assert epoch_of(other) != epochs[0]
