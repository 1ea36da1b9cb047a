"""Errors of a link in operations that run at once, in the thread, and after a send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import distributed

from slurmddp.collectives.link import ThreadLink
from slurmddp.errors import RankFailure
from slurmddp.training.rank_main import is_lost_rank
from slurmddp.transports.link_group import LinkGroup
from slurmddp.transports.operation_queue import Finished, Operation, OperationQueue
from support.runs.agent_runs import wait_until


class Broken:
    """A link that fails in every call, or in the wait after a send."""

    rank, world_size = 0, 2

    def __init__(self, error: Exception, *, sends: bool = False) -> None:
        self._error, self._sends = error, sends

    def _fail(self, *_: object) -> None:
        raise self._error

    recv = _fail

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        return self._fail if self._sends else self._fail()  # type: ignore[return-value,func-returns-value]


def errors_of(link: Broken) -> list[Exception]:
    """Return the error of a collective, a send and a receive."""
    group, tensor = LinkGroup(link), torch.zeros(3)
    calls: list[Callable[[], distributed.Work]] = [
        group.barrier,
        lambda: group.send([tensor], 1),
        lambda: group.recv([tensor], 1),
    ]
    found = []
    for call in calls:
        with pytest.raises((OSError, RankFailure, ValueError)) as caught:
            call().wait()
        found.append(caught.value)
    group._queue.end()
    return found


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "Connection reset by peer"), TimeoutError("no answer within 60 s")]
)
def test_a_broken_link_is_a_lost_rank(error: Exception, sends: bool) -> None:
    for found in errors_of(Broken(error, sends=sends)):
        assert is_lost_rank(found)
        assert found.__cause__ is error
        assert str(error) in str(found)


@pytest.mark.parametrize("error", [ValueError("a bug of the transport"), OSError(28, "No space left")])
def test_other_errors_of_a_link_are_raised_as_they_are(error: Exception) -> None:
    assert errors_of(Broken(error)) == [error] * 3


def test_an_operation_that_is_not_done_in_time_is_a_lost_rank() -> None:
    class Stuck(Broken):
        def all_reduce(self, flat: torch.Tensor, op: object) -> None:
            released.wait(240)

    released = threading.Event()
    group = LinkGroup(Stuck(ValueError("unused")))
    with pytest.raises(RankFailure, match=r"did not end within 0\.05 s"):
        group.allreduce([torch.ones(1)]).wait(timedelta(seconds=0.05))
    released.set()
    group._end()


@pytest.mark.parametrize(
    "is_done",
    [Operation.wait, Operation.is_completed, Operation.is_success, lambda work: work.get_future().done()],
    ids=["wait", "is_completed", "is_success", "future"],
)
def test_a_receive_begins_when_somebody_asks_for_it(is_done: Callable[[Operation], bool]) -> None:
    first, second = ThreadLink.of_threads(2)
    group, tensor = LinkGroup(first), torch.zeros(1)
    second.send(torch.ones(1), 0)
    work = group.recv([tensor], 1)
    assert isinstance(work, Operation)
    wait_until(lambda: is_done(work), "the receive is done")
    assert tensor == 1 and work.result() == [tensor]
    group._end()


def test_the_caller_runs_an_operation_only_if_no_earlier_one_waits() -> None:
    queue, released = OperationQueue(), threading.Event()
    queue.put(Operation("first", lambda: released.wait(240), [], timedelta(seconds=60)))
    assert not queue.run(lambda: None)
    released.set()
    wait_until(lambda: queue.run(lambda: None), "the caller runs an operation")
    queue.end()


def test_the_future_of_a_finished_operation_has_its_outputs() -> None:
    future = Finished([7]).get_future()
    assert future.done() and future.value() == [7]
