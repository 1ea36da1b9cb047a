"""Iterable data: divided among all readers, each sample once, resumed at the loop's position."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from slurmddp.checkpoint.state import Checkpoint
from slurmddp.collectives import values as collectives
from slurmddp.errors import MismatchError
from slurmddp.training.checkpointing import training_state
from slurmddp.training.data.distributed_loader import DistributedLoader
from slurmddp.training.data.iterable import IterableLoader
from support.loaders import loader_of

SAMPLES = 53


class Shared(IterableDataset[Any]):
    """Numbers, in an order of the epoch's own, with something drawn for each; says nothing of its place."""

    def __init__(self) -> None:
        self.epoch, self.share, self.passed = 0, (0, 1), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def set_share(self, part: int, parts: int) -> None:
        self.share = part, parts

    def __iter__(self) -> Iterator[tuple[int, float]]:
        part, parts = self.share
        while (number := self.passed * parts + part) < SAMPLES:
            self.passed += 1
            yield (number * 7 + self.epoch) % SAMPLES, random.random()
        self.passed = 0


class Placed(Shared):
    """Says where it is, too, and can be put there."""

    def state_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "as a tensor": torch.tensor(self.passed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passed = state["passed"]
        assert state["as a tensor"] == self.passed


class Live(Shared):
    """Gives away the very dict that holds its place, and goes on in the one that it is given."""

    def __init__(self) -> None:
        self.state = {"passed": 0}
        super().__init__()

    @property
    def passed(self) -> int:
        return self.state["passed"]

    @passed.setter
    def passed(self, passed: int) -> None:
        self.state["passed"] = passed

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Stateless(Shared):
    def __iter__(self) -> Iterator[tuple[int, float]]:
        self.passed = 0
        return super().__iter__()


class Deterministic(Stateless):
    deterministic = True


def make(data: type, workers: int, rank: int = 0, ranks: int = 1, **options: Any) -> DistributedLoader:
    return loader_of(data(), batch_size=3, num_workers=workers, rank=rank, ranks=ranks, **options)


def numbers_of(batches: list[Any]) -> list[int]:
    return [number for numbers, _ in batches for number in numbers.tolist()]


def shown(batches: list[Any]) -> list[str]:
    return [str(batch) for batch in batches]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_readers_together_give_each_sample_once(ranks: int, workers: int) -> None:
    loaders = [make(Stateless, workers, rank, ranks) for rank in range(ranks)]
    for _ in range(2):
        assert sorted(number for own in loaders for number in numbers_of(list(own))) == [*range(SAMPLES)]


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize(("data", "workers"), [(Placed, 0), (Placed, 2), (Stateless, 0), (Stateless, 2)])
def test_a_resume_anywhere_gives_the_rest_of_the_epoch_and_the_next_one(
    data: type, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Late in the epoch one of the two readers has come to its end, and the other has not."""
    options = {"prefetch_factor": 3, "persistent_workers": True} if workers else {}
    whole = make(data, workers, **options)
    epochs = [shown(list(whole)) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for stop in (1, 5, len(epochs[0]) - 1):
        stopped, resumed = (make(data, workers, **options) for _ in range(2))
        walk = iter(stopped)
        before = shown([next(walk) for _ in range(stop)])
        resumed.load_state_dict(stopped.state_dict())
        resumed.load_rank_state(stopped.rank_state())
        assert before + shown(list(resumed)) == epochs[0]
        assert shown(list(resumed)) == epochs[1]
        del walk
    assert ("Stateless is read again" in caplog.text) == (data is Stateless)


def test_a_rank_resumes_in_its_own_epoch_when_rank_zero_has_begun_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, resumed = (make(Placed, 0, rank, 2) for rank in (0, 1, 1))
    list(first)
    expected = shown(list(make(Placed, 0, 1, 2)))
    walk = iter(second)
    before = shown([next(walk) for _ in range(3)])
    resumed.load_state_dict(first.state_dict())
    assert resumed.epoch == 1
    saved = [{"data": [one.rank_state()]} for one in (first, second)]
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    training_state.restore_data(Checkpoint(1, {"rng": saved}, {}), [resumed])
    assert resumed.epoch == 0
    assert before + shown(list(resumed)) == expected


@pytest.mark.parametrize("data", [Placed, Live])
def test_batches_after_a_rollback_come_again(data: type) -> None:
    loader, other = make(data, 0), make(data, 0)
    expected = shown(list(other))[1:4]
    walk = iter(loader)
    next(walk)
    mark = loader.mark()
    for _ in range(3):
        assert shown([next(walk) for _ in range(3)]) == expected
        loader.go_back(mark)
        walk = iter(loader)


def draws_of(seed: int, workers: int) -> set[float]:
    """Return what two ranks draw in two epochs."""
    loaders = [make(Stateless, workers, rank, 2, seed=seed) for rank in range(2)]
    return {drawn for own in loaders for _ in range(2) for _, batch in own for drawn in batch.tolist()}


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_draws_of_a_sample_follow_from_epoch_reader_and_number(workers: int) -> None:
    found = draws_of(4, workers)
    assert len(found) == 2 * SAMPLES
    assert draws_of(4, workers) == found
    assert not found & draws_of(5, workers)


def test_deterministic_iterable_data_is_not_seeded() -> None:
    random.seed(1)
    expected = [random.random() for _ in range(SAMPLES)]
    random.seed(1)
    found = [drawn for _, batch in make(Deterministic, 0) for drawn in batch.tolist()]
    assert found == pytest.approx(expected)


def test_draws_of_iterable_data_do_not_change_the_ranks_generators() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    list(make(Stateless, 0))
    assert random.random() == expected


def stopped_at(workers: int, batches: int = 2, ranks: int = 1) -> DistributedLoader:
    loader = make(Placed, workers, ranks=ranks)
    loader.load_rank_state(
        {"epoch": 0, "batches": batches, "workers": workers, "next": 0, "places": [None] * 9}
    )
    return loader


@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0), (2, 1)])
def test_another_number_of_loader_workers_is_refused_within_an_epoch(before: int, now: int) -> None:
    resumed = make(Placed, now)
    resumed.load_state_dict(stopped_at(before, 0).state_dict())
    with pytest.raises(
        MismatchError,
        match=rf"{before} loader worker\(s\) per rank read the iterable Placed.*train.workers={before}",
    ):
        resumed.load_state_dict(stopped_at(before).state_dict())


def test_a_resume_within_an_epoch_needs_as_many_ranks() -> None:
    """Shares may differ in length: rank 0 has come to its end, which is all that the common state says."""
    states = [stopped_at(0, batches, 2).rank_state() for batches in (0, 3)]
    one = make(Placed, 0)
    one.load_state_dict(stopped_at(0, 0, 2).state_dict())
    one.check_rank_states([states[0], states[0]])
    with pytest.raises(
        MismatchError, match=r"2 rank\(s\) had trained 3 batch\(es\) each of Placed.*with 2 ranks, or"
    ):
        one.check_rank_states(states)
    with pytest.raises(MismatchError, match=r"Resume with 2 ranks and num_workers=0, or"):
        make(Placed, 2).check_rank_states(states)
    with pytest.raises(
        MismatchError, match=r"2 ranks .* different epochs of Placed: 0, 1. So 1 rank.*with 2 ranks"
    ):
        one.check_rank_states([states[0], {**states[0], "epoch": 1}])
    make(Placed, 0, ranks=2).check_rank_states([states[0], {**states[0], "epoch": 1}])
    assert isinstance(one, IterableLoader)
    with pytest.raises(MismatchError, match=r"0 loader worker\(s\) per rank read the iterable Placed"):
        make(Placed, 2, ranks=2).check_rank_states(states)


def test_a_refused_checkpoint_loads_nothing() -> None:
    stopped = [stopped_at(0, batches, 2) for batches in (0, 3)]
    rng = [{"data": [loader.rank_state()]} for loader in stopped]
    state = {"objects": {}, "loaders": [stopped[0].state_dict()], "rng": rng}
    training_state.check(state, {}, [make(Placed, 0, 0, 2)], lambda module: module)
    with pytest.raises(MismatchError, match=r"2 rank\(s\) had trained 3 batch\(es\) each"):
        training_state.check(state, {}, [make(Placed, 0)], lambda module: module)


class ByWorker(IterableDataset[Any]):
    """Divides itself by the number of its loader worker, as torch's documentation shows."""

    deterministic = True

    def __iter__(self) -> Iterator[list[int]]:
        worker = get_worker_info()
        assert worker is not None
        assert worker.dataset is self
        opened = getattr(self, "opened_by", worker.id)
        for number in range(worker.id, SAMPLES, worker.num_workers):
            yield [number, opened, torch.initial_seed()]


class ByWorkerWithState(ByWorker):
    """Keeps its position beside the number of the worker that has read it, as data sets of shards do."""

    passed = 0

    def __iter__(self) -> Iterator[list[int]]:
        start, self.passed = self.passed, 0
        for number, sample in enumerate(super().__iter__()):
            if number >= start:
                self.passed = number + 1
                yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "worker": get_worker_info().id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["worker"] == get_worker_info().id
        self.passed = state["passed"]


def open_shard(worker_id: int) -> None:
    get_worker_info().dataset.opened_by = worker_id


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("data", [ByWorker, ByWorkerWithState])
def test_a_resume_gives_each_worker_the_number_that_it_had(data: type, batch_size: int | None) -> None:
    """Two resumes, each in the middle of a round of three workers."""
    options = {
        "batch_size": batch_size,
        "num_workers": 3,
        "worker_init_fn": open_shard,
        "persistent_workers": True,
    }

    def loader() -> DistributedLoader:
        return loader_of(data(), **options)

    def interrupted(stops: Sequence[int]) -> list[str]:
        seen: list[str] = []
        state = None
        for stop in stops:
            part = loader()
            if state is not None:
                part.load_state_dict(state[0])
                part.load_rank_state(state[1])
            walk = iter(part)
            seen += shown(list(islice(walk, stop)))
            state = part.state_dict(), part.rank_state()
            del walk
        return seen

    whole = shown(list(loader()))
    assert interrupted([4, 4, len(whole)]) == whole
    assert interrupted([5, len(whole)]) == whole


def test_the_warning_of_undivided_data_names_the_method_that_divides_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(Placed, 2, ranks=2)
    loader_of(ByWorker(), batch_size=3)
    assert not caplog.text
    loader_of(ByWorker(), batch_size=3, num_workers=2, ranks=2)
    assert "ByWorker is iterable and has no method set_share(part, parts)" in caplog.text
    assert "each of its 4 readers trains all samples" in caplog.text
