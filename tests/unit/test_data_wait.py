"""The wait for a step's first batch, on an iterator and a pause of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.training.data_wait import StoppedWaiting, interruptible


class Worker:
    ended = False

    def terminate(self) -> None:
        self.ended = True


class Batches:
    """Stands for torch's iterator: data comes at the look that is told."""

    def __init__(self, comes_at: int) -> None:
        self.looks, self._comes_at, self._workers = 0, comes_at, [Worker(), Worker()]

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        while True:
            success, data = self._try_get_data()
            if success:
                return data

    def _try_get_data(self, timeout: float = 5.0) -> tuple[bool, Any]:
        self.looks += 1
        return self.looks >= self._comes_at, "data"


class Pause:
    """All ranks stop before the step from look `over_at` on; `follows`: the others are in it already."""

    def __init__(
        self, batches: Batches | Samples, over_at: int | None = None, *, follows: bool = True
    ) -> None:
        self.waits_for_step, self.held, self.follows = True, 0, follows
        self._batches, self._over_at = batches, over_at

    def hold(self) -> None:
        self.held += 1

    def release(self) -> bool:
        return self.follows

    def is_over(self) -> bool:
        return self._over_at is not None and self._batches.looks >= self._over_at


def test_data_that_comes_begins_the_step() -> None:
    batches = Batches(comes_at=120)
    pause = Pause(batches)
    assert next(interruptible(batches, pause)) == "data"
    assert pause.held and not any(worker.ended for worker in batches._workers)


def test_a_stop_ends_the_wait_at_the_next_look_and_the_workers_with_it() -> None:
    batches = Batches(comes_at=10**9)
    with pytest.raises(StoppedWaiting):
        next(interruptible(batches, Pause(batches, over_at=7, follows=False)))
    assert batches.looks == 7
    assert all(worker.ended for worker in batches._workers)


def test_data_that_comes_after_the_ranks_have_agreed_is_not_handed_out() -> None:
    batches = Batches(comes_at=3)
    with pytest.raises(StoppedWaiting):
        next(interruptible(batches, Pause(batches, follows=False)))


def test_a_later_batch_of_a_step_is_waited_for() -> None:
    batches = Batches(comes_at=3)
    pause = Pause(batches, over_at=0, follows=False)
    pause.waits_for_step = False
    assert next(interruptible(batches, pause)) == "data"
    assert not pause.held


def test_an_iterator_is_changed_once_and_another_kind_never() -> None:
    batches, plain = Batches(comes_at=1), iter([1])
    pause = Pause(batches)
    first = interruptible(batches, pause)
    changed = first._try_get_data  # type: ignore[attr-defined]
    assert interruptible(first, pause)._try_get_data is changed  # type: ignore[attr-defined]
    assert next(interruptible(plain, pause)) == 1


class Samples:
    """Ten samples, of which each look is counted."""

    def __init__(self) -> None:
        self.looks = 0

    def __getitem__(self, index: int) -> int:
        self.looks += 1
        return index


class ByTheBatch(Samples):
    def __getitems__(self, keys: list[int]) -> list[int]:
        return [self[key] for key in keys]


class Reading:
    """Stands for torch's iterator in a process that reads the samples itself."""

    def __init__(self, **fetcher: Any) -> None:
        self._dataset_fetcher = SimpleNamespace(**fetcher)

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Any:
        return self._next_data()

    def _next_data(self) -> Any:
        fetcher = self._dataset_fetcher
        if hasattr(fetcher, "dataset_iter"):
            return [next(fetcher.dataset_iter) for _ in range(4)]
        return fetcher.dataset.__getitems__([0, 1, 2, 3])


def iterable(samples: Samples) -> Reading:
    return Reading(dataset_iter=map(samples.__getitem__, range(8)))


def test_a_rank_that_reads_by_itself_stops_between_two_samples() -> None:
    for make in (lambda samples: Reading(dataset=samples), iterable):
        samples = Samples()
        pause = Pause(samples, over_at=2, follows=False)
        with pytest.raises(StoppedWaiting):
            next(interruptible(make(samples), pause))
        assert (samples.looks, pause.held) == (2, 1)


@pytest.mark.parametrize("samples", [Samples(), ByTheBatch()])
def test_a_batch_that_was_read_is_not_handed_out_once_the_ranks_have_agreed(samples: Samples) -> None:
    with pytest.raises(StoppedWaiting):
        next(interruptible(Reading(dataset=samples), Pause(samples, follows=False)))
    assert samples.looks == 4


def test_a_rank_that_reads_by_itself_follows_those_that_are_in_the_step() -> None:
    samples = Samples()
    assert next(interruptible(Reading(dataset=samples), Pause(samples, over_at=0))) == [0, 1, 2, 3]
    held = Pause(samples, over_at=0, follows=False)
    held.waits_for_step = False
    held.is_over = lambda: False  # type: ignore[method-assign] # nothing is held
    assert next(interruptible(Reading(dataset=samples), held)) == [0, 1, 2, 3]
    assert held.held == 0
