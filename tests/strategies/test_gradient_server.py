"""The server of gradients, with threads as ranks: which gradients it applies, and which ranks wait."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import nn

from slurmddp.collectives.link import ThreadLink
from slurmddp.errors import RankFailure
from slurmddp.strategies.gradient_server import LEFT, GradientServer, MessageFormat, Values
from support.runs.agent_runs import wait_until


def server_of(staleness: int, ranks: int, timeout_s: float = 60.0, **settings: float) -> GradientServer:
    """Return an open server of one weight, 1.0, under SGD with a learning rate of 1."""
    given = torch.optim.SGD([nn.Parameter(torch.ones(1))], **{"lr": 1.0, **settings})
    server = GradientServer(
        torch.optim.SGD(given.param_groups[0]["params"], **{"lr": 1.0, **settings}),
        given,
        ranks,
        staleness,
        timeout_s,
    )
    server.open()
    return server


def gradient(value: float) -> Values:
    return [torch.tensor([value])]


def weight_in(server: GradientServer, message: torch.Tensor) -> float:
    (value,) = server.format.unpack(message)
    assert value is not None
    return value.item()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def waits(answer: Future[torch.Tensor]) -> bool:
    """Return whether a step still has no answer, long after it could have had one."""
    time.sleep(0.05)
    return not answer.done()


def test_c4_without_staleness_one_step_on_the_mean_answers_all_ranks(threads) -> None:
    server = server_of(0, 3)
    early = [threads.submit(server.exchange, rank, gradient(value)) for rank, value in ((2, 0.6), (0, 0.3))]
    assert all(map(waits, early))
    answers = [server.exchange(1, gradient(0.9)), *(one.result() for one in early)]
    assert [weight_in(server, one) for one in answers] == pytest.approx([0.4] * 3)
    assert server.staleness == {0: 3}


def test_gradients_are_added_in_the_order_of_ranks_whichever_comes_first(threads) -> None:
    server = server_of(0, 3)
    early = [threads.submit(server.exchange, rank, gradient(value)) for rank, value in ((2, -1e8), (0, 1e8))]
    wait_until(lambda: len(server._waiting) == 2, "two gradients")
    assert weight_in(server, server.exchange(1, gradient(1.0))) == 1, "1e8 + 1 is 1e8 in float32"
    assert [weight_in(server, one.result()) for one in early] == [1, 1]


def test_a_rank_without_a_gradient_counts_as_one_of_zero(threads) -> None:
    server = server_of(0, 2)
    other = threads.submit(server.exchange, 1, [None])
    assert weight_in(server, server.exchange(0, gradient(0.6))) == pytest.approx(0.7)
    other.result()


def test_c4_a_rank_is_never_more_steps_ahead_than_the_bound(threads) -> None:
    server = server_of(2, 2)
    # A gradient is applied at once, with its share of the learning rate.
    assert weight_in(server, server.exchange(0, gradient(0.2))) == pytest.approx(0.9)
    server.exchange(0, gradient(0.2))
    third = threads.submit(server.exchange, 0, gradient(0.2))
    assert waits(third), "two steps ahead of rank 1, a third one waits"
    assert weight_in(server, server.exchange(1, gradient(1.0))) == pytest.approx(0.2)
    assert weight_in(server, third.result()) == pytest.approx(0.2)
    server.exchange(1, gradient(0.0))
    assert server.staleness == {0: 3, 1: 1, 2: 1} and max(server.staleness) <= 2
    server.close()
    server.open()
    server.exchange(1, gradient(0.0))
    assert server.staleness == {0: 4, 1: 1, 2: 1}, "all ranks have the newest weights after `open`"


def test_a_rank_that_has_left_lets_the_others_go_on_if_gradients_may_be_stale(threads) -> None:
    server = server_of(1, 2)
    server.exchange(0, gradient(0.0))
    second = threads.submit(server.exchange, 0, gradient(0.0))
    assert waits(second)
    link, of_rank_1 = ThreadLink.of_threads(2)
    of_rank_1.send(server.format.pack([None], LEFT), 0)
    server.serve(1, link)
    second.result()
    server.exchange(0, gradient(0.0))
    synchronous = server_of(0, 2)
    synchronous.leave(1)
    with pytest.raises(RankFailure, match="Rank 1 has left the training, and other ranks still take steps"):
        synchronous.exchange(0, gradient(0.0))


def test_ranks_that_take_no_step_are_named() -> None:
    server = server_of(0, 3, timeout_s=0.05)
    with pytest.raises(RankFailure, match=r"waited 0.05 s for a step of rank 1, rank 2\."):
        server.exchange(0, gradient(0.0))
    closed = server_of(0, 3, timeout_s=0.05)
    closed.close()
    with pytest.raises(RankFailure, match=r"waited 0.05 s for a step of rank 0\."):
        closed.exchange(1, gradient(0.0))


def test_weights_state_and_changed_settings_go_to_the_server_and_back() -> None:
    server = server_of(0, 1, momentum=0.5)
    given = server._given
    server.exchange(0, gradient(0.2))
    given.param_groups[0]["lr"] = 0.5  # As a scheduler does.
    server.exchange(0, gradient(0.2))
    given.param_groups[0]["lr"] = 0.25
    server.close()
    assert given.param_groups[0]["lr"] == 0.25
    (parameter,) = given.param_groups[0]["params"]
    assert parameter.item() == pytest.approx(1 - 0.2 - 0.5 * (0.2 + 0.5 * 0.2))
    assert given.state[parameter]["momentum_buffer"].item() == pytest.approx(0.3)
    with torch.no_grad():
        parameter.fill_(7.0)  # As a load does.
    server.open()
    assert weight_in(server, server.exchange(0, gradient(0.0))) == pytest.approx(7 - 0.25 * 0.15)


class Halving(torch.optim.SGD):
    """An optimizer that halves its learning rate after each step."""

    def step(self, closure: object = None) -> None:
        super().step()
        self.param_groups[0]["lr"] /= 2


def test_settings_that_the_optimizer_changes_stay_changed_and_go_back() -> None:
    given = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    server = GradientServer(Halving(given.param_groups[0]["params"], lr=1.0), given, 1, 0, 60.0)
    server.open()
    server.exchange(0, gradient(-1.0))
    given.param_groups[0]["lr"] = 0.4  # As a scheduler does.
    for _ in range(2):
        server.exchange(0, gradient(-1.0))
    server.close()
    assert given.param_groups[0]["params"][0].item() == pytest.approx(1 + 0.4 + 0.2)
    assert given.param_groups[0]["lr"] == pytest.approx(0.1)


def test_an_error_of_the_optimizer_ends_the_steps_of_all_ranks(threads) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise ValueError("not a number")

    given = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    server = GradientServer(Failing(given.param_groups[0]["params"], lr=1.0), given, 2, 0, 60.0)
    server.open()
    first, second = ThreadLink.of_threads(2)
    served = threads.submit(server.serve, 1, first)
    own = threads.submit(server.exchange, 0, gradient(0.0))
    wait_until(lambda: 0 in server._waiting, "the gradient of rank 0")
    second.send(server.format.pack(gradient(0.0)), 0)
    answer = server.format.empty()
    second.recv(answer, 0)
    assert server.format.word(answer) == 1, "rank 0 has failed"
    with pytest.raises(RankFailure, match="not a number"):
        own.result()
    second.send(server.format.pack([None], LEFT), 0)
    served.result()


def test_a_step_waits_until_the_server_is_open(threads) -> None:
    server = server_of(1, 2)
    server.close()
    answer = threads.submit(server.exchange, 1, gradient(0.0))
    assert waits(answer)
    server.open()
    answer.result()


@pytest.mark.parametrize("receives", [False, True])
def test_a_link_without_its_rank_stops_the_server(receives: bool) -> None:
    class Gone:
        rank, world_size = 0, 2

        def send(self, tensor: torch.Tensor, to: int):
            raise ConnectionError("closed")

        def recv(self, tensor: torch.Tensor, source: int) -> None:
            if not receives:
                raise ConnectionError("closed")
            tensor.copy_(server.format.pack(gradient(0.0)))

    server = server_of(1, 2)
    thread = threading.Thread(target=server.serve, args=(1, Gone()))
    thread.start()
    thread.join(60)
    for _ in range(receives + 1):
        server.exchange(0, gradient(0.0))
    with pytest.raises(RankFailure, match="Rank 1 has left the training: closed"):
        server.exchange(0, gradient(0.0))


def test_a_message_carries_every_dtype_shape_and_absent_value() -> None:
    values = [
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.empty(0, 3),
        torch.tensor([True]),
        torch.tensor([1e300], dtype=torch.float64),
        torch.tensor([1 + 2j]),
    ]
    form = MessageFormat(values)
    message = form.pack([*values[:5], None], word=-3)
    assert len(message) == form.bytes == 2 + 24 + 0 + 1 + 8 + 8 + 6 + 8
    assert form.word(message) == -3
    *found, absent = form.unpack(message)
    assert absent is None
    for value, one in zip(values, found, strict=False):
        assert one is not None and torch.equal(one, value) and one.dtype == value.dtype


def test_the_mean_of_16_bit_gradients_is_finite_although_their_sum_is_not(threads) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    given = torch.optim.SGD([weight], lr=1e-4)
    server = GradientServer(torch.optim.SGD([weight], lr=1e-4), given, 2, 0, 60.0)
    server.open()
    large = [torch.tensor([4e4], dtype=torch.float16)]
    other = threads.submit(server.exchange, 1, large)
    assert weight_in(server, server.exchange(0, large)) == pytest.approx(1 - 4, abs=0.01)
    other.result()
