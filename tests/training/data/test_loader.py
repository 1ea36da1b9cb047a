"""Loaders that resume: epochs, positions, devices, and samplers of the user."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, SlurmddpError
from slurmddp.training.checkpointing import training_state
from slurmddp.training.data.base import DistributedLoader, to_device
from slurmddp.training.data.loader import distribute
from slurmddp.training.data.passthrough import PassthroughLoader

CPU = torch.device("cpu")


def make(data, *, batch_size: int = 3, **options) -> DistributedLoader:
    return distribute(
        DataLoader(data, batch_size=batch_size, **options),
        device=CPU,
        info=RankInfo(environment="single"),
        seed=4,
    )


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def hand_over(stopped: DistributedLoader, resumed: DistributedLoader) -> None:
    """Do as a checkpoint does."""
    resumed.load_state_dict(stopped.state_dict())
    if (own := stopped.rank_state()) is not None:
        resumed.load_rank_state(own)


def epoch_of(loader: DistributedLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_after", [0, 2, 4])
def test_a_loaded_position_gives_the_rest_of_the_epoch(workers: int, stop_after: int) -> None:
    whole, stopped, resumed = (make(numbers(12), shuffle=True, num_workers=workers) for _ in range(3))
    batches = [epoch_of(whole), epoch_of(whole)]
    epoch_of(stopped)
    walk = iter(stopped)
    for _ in range(stop_after):
        next(walk)
    resumed.load_state_dict(stopped.state_dict())
    del walk
    assert resumed.epoch == 1 if stop_after else 0 <= resumed.epoch <= 1
    assert epoch_of(resumed) == batches[1][stop_after:]
    assert epoch_of(resumed) == epoch_of(whole)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_position_counts_the_samples_of_all_ranks(ranks: int) -> None:
    info = RankInfo(environment="local", rank=ranks - 1, world_size=ranks, local_world_size=ranks)
    loader = distribute(DataLoader(numbers(50), batch_size=3), device=CPU, info=info, seed=4)
    next(walk := iter(loader))
    next(walk)
    assert loader.state_dict()["position"] == 2 * 3 * ranks


def test_a_stop_after_a_last_batch_that_is_smaller_begins_the_next_epoch() -> None:
    whole, stopped, resumed = (make(numbers(11), shuffle=True) for _ in range(3))
    epochs = [epoch_of(whole) for _ in range(2)]
    walk = iter(stopped)
    for _ in range(4):
        next(walk)
    resumed.load_state_dict(stopped.state_dict())
    assert epoch_of(resumed) == []
    assert epoch_of(resumed) == epochs[1]
    del walk


def test_after_a_break_the_next_loop_is_the_next_epoch() -> None:
    loader, other = make(numbers(12), shuffle=True), make(numbers(12), shuffle=True)
    for _ in loader:
        break
    epoch_of(other)
    assert epoch_of(loader) == epoch_of(other)


def test_without_shuffle_every_epoch_is_in_order() -> None:
    loader = make(numbers(5), batch_size=2)
    assert epoch_of(loader) == epoch_of(loader) == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3
    assert loader.epoch == 2


def test_another_length_is_refused() -> None:
    state = make(numbers(12), shuffle=True).state_dict()
    with pytest.raises(SlurmddpError, match="samples"):
        make(numbers(13), shuffle=True).load_state_dict(state)


def test_a_refused_load_leaves_all_loaders_at_their_positions() -> None:
    next(walk := iter(stopped := make(numbers(12))))
    state = {"objects": {}, "loaders": [stopped.state_dict(), make(numbers(13)).state_dict()]}
    loaders = [make(numbers(12)), make(numbers(12))]
    before = [loader.state_dict() for loader in loaders]
    with pytest.raises(SlurmddpError, match="samples"):
        training_state.apply(state, {}, loaders, lambda module: module, frozenset())
    assert [loader.state_dict() for loader in loaders] == before
    del walk


def test_a_users_sampler_keeps_its_order() -> None:
    loader = make(numbers(6), sampler=[3, 1, 2, 0, 5, 4])
    assert isinstance(loader, PassthroughLoader)
    assert epoch_of(loader) == [[3, 1, 2], [0, 5, 4]]
    assert loader.epoch == 1
    with pytest.raises(SlurmddpError, match="had no sampler of the user"):
        loader.load_state_dict(make(numbers(6), shuffle=True).state_dict())


class Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.arange(7) + 100 * self.epoch)


def test_iterable_data_resumes_after_the_trained_batches() -> None:
    stopped, resumed = make(Stream()), make(Stream())
    walk = iter(stopped)
    assert next(walk).tolist() == [0, 1, 2]
    hand_over(stopped, resumed)
    assert [batch.tolist() for batch in resumed] == [[3, 4, 5], [6]]
    assert [batch.tolist() for batch in resumed] == [[100, 101, 102], [103, 104, 105], [106]]


def test_reading_iterable_data_again_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    stopped, resumed = make(Stream()), make(Stream())
    next(walk := iter(stopped))
    hand_over(stopped, resumed)
    assert "thrown away" not in caplog.text
    next(iter(resumed))
    assert "Stream is read again" in caplog.text and "1 batches" in caplog.text
    del walk


class Counter(IterableDataset):
    """Counts on from where it is; says where that is."""

    def __init__(self) -> None:
        self.at = self.read = 0

    def __iter__(self):
        while self.at < 20:
            self.at += 1
            self.read += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_iterable_data_with_a_state_reads_no_sample_again() -> None:
    stopped, resumed = make(Counter(), batch_size=4), make(Counter(), batch_size=4)
    walk = iter(stopped)
    assert [next(walk).tolist() for _ in range(2)][-1] == [5, 6, 7, 8]
    hand_over(stopped, resumed)
    assert (resumed.rank_state(), resumed.state_dict()) == (stopped.rank_state(), stopped.state_dict())
    assert [batch.tolist() for batch in resumed] == [[*range(n, n + 4)] for n in (9, 13, 17)]
    assert resumed.dataset.read == 12
    assert [batch[0].item() for batch in resumed] == [1, 5, 9, 13, 17]


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("data", [Stream, Counter, lambda: numbers(12)])
def test_batches_that_workers_fetched_ahead_do_not_count(data, persistent: bool) -> None:
    options = {"batch_size": 2, "num_workers": 2, "persistent_workers": persistent, "prefetch_factor": 4}
    stopped, resumed, whole = (make(data(), **options) for _ in range(3))
    first = [str(batch) for batch in whole]
    for epoch in range(2):
        walk = iter(stopped)
        for handed in range(1, 3):
            next(walk)
            state = stopped.state_dict()
            assert state.get("position", 0) + state.get("batches", 0) * 2 == handed * 2
        hand_over(stopped, resumed)
        rest = [str(batch) for batch in resumed]
        assert [str(batch) for batch in walk] == rest
        assert epoch or rest == first[2:]


def test_other_ranks_can_not_resume_iterable_data_within_an_epoch() -> None:
    loader = make(Stream())
    loader.load_state_dict({"epoch": 3, "batches": 0, "world_size": 4})
    assert loader.epoch == 3
    with pytest.raises(SlurmddpError, match=r"4 ranks had read 2 batches each of Stream.*Resume with 4"):
        loader.load_state_dict({"epoch": 3, "batches": 2, "world_size": 4})


def test_a_users_batch_sampler_keeps_its_order() -> None:
    loader = distribute(
        DataLoader(numbers(4), batch_sampler=[[0, 3], [1]]),
        device=CPU,
        info=RankInfo(environment="single"),
        seed=0,
    )
    assert epoch_of(loader) == [[0, 3], [1]]


def test_unbatched_data_stays_unbatched() -> None:
    loader = make([torch.tensor([1, 2]), torch.tensor([3, 4])], batch_size=None)
    assert [item.tolist() for item in loader] == [[1, 2], [3, 4]]


class Draws(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_workers_draw_differently_by_epoch_and_equally_by_seed() -> None:
    first, again = (make(Draws(), batch_size=2, num_workers=1) for _ in range(2))
    epochs = [[batch.tolist() for batch in first] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [batch.tolist() for batch in again] == epochs[0]


def test_ranks_have_different_worker_seeds() -> None:
    """The seeds of workers count where no sample is seeded: with a sampler of the user."""
    seen = []
    for rank in range(2):
        info = RankInfo(environment="local", rank=rank, world_size=2, local_world_size=2)
        given = DataLoader(Draws(), batch_size=2, num_workers=1, sampler=range(4))
        loader = distribute(given, device=CPU, info=info, seed=1)
        seen.append([batch.tolist() for batch in loader])
    assert seen[0] != seen[1]


def test_a_users_worker_init_fn_still_runs(tmp_path) -> None:
    loader = make(numbers(4), num_workers=1, worker_init_fn=lambda number: (tmp_path / f"{number}").touch())
    epoch_of(loader)
    assert (tmp_path / "0").exists()


def test_a_loader_keeps_its_options() -> None:
    options = {
        "num_workers": 2, "collate_fn": list, "pin_memory": True, "timeout": 77, "prefetch_factor": 5,
        "persistent_workers": True, "multiprocessing_context": "spawn", "drop_last": True, "batch_size": 2,
    }  # fmt: skip
    for own in ({"shuffle": True}, {"sampler": [0, 1]}):
        given = DataLoader(numbers(4), **options, **own)
        made = make(numbers(4), **options, **own)._loader
        assert {name: getattr(made, name) for name in options} == {
            name: getattr(given, name) for name in options
        }


def test_len_is_the_number_of_batches_of_an_epoch() -> None:
    for accumulate, drop_last, batches in (
        (1, True, 6),
        (2, True, 6),
        (3, True, 6),
        (4, True, 4),
        (4, False, 7),
    ):
        loader = distribute(
            DataLoader(numbers(20), batch_size=3, drop_last=drop_last),
            device=CPU,
            info=RankInfo(environment="single"),
            seed=4,
            accumulate=accumulate,
        )
        assert len(loader) == loader.remaining == len(epoch_of(loader)) == batches


@pytest.mark.parametrize("sampler", [None, list(range(20))], ids=["ordered", "own sampler"])
@pytest.mark.parametrize("drop_last", [True, False])
def test_remaining_counts_the_batches_of_a_resumed_epoch(drop_last: bool, sampler: list[int] | None) -> None:
    def loader() -> DistributedLoader:
        return make(numbers(20), batch_size=3, drop_last=drop_last, sampler=sampler)

    first, second = loader(), loader()
    batches = iter(first)
    left = [first.remaining]
    for _ in range(4):
        next(batches)
        left.append(first.remaining)
    whole = 6 if drop_last else 7
    assert left == [whole - number for number in range(5)]
    second.load_state_dict(first.state_dict())
    assert second.remaining == whole - 4 == len(list(second))
    assert second.remaining == len(second) == whole


@pytest.mark.parametrize(("samples", "ranks"), [(1, 2), (3, 4)])
def test_fewer_samples_than_ranks_are_refused(samples: int, ranks: int) -> None:
    info = RankInfo(environment="local", rank=0, world_size=ranks, local_world_size=ranks)
    loader = DataLoader(numbers(samples))
    with pytest.raises(ConfigError, match=f"has {samples} samples for {ranks} ranks"):
        distribute(loader, device=CPU, info=info, seed=1)
    assert len(epoch_of(distribute(loader, device=CPU, info=info, seed=1, even=False))) == 1
    assert len(distribute(DataLoader(numbers(ranks)), device=CPU, info=info, seed=1)) == 1


Pair = namedtuple("Pair", "x y")


def test_nested_tensors_are_moved() -> None:
    batch = {"a": [torch.ones(1), (torch.ones(2), "text")], "b": Pair(torch.ones(3), 4)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].x.is_meta
    assert moved["b"].y == 4
