"""All-reduce algorithms: the sum of all ranks, with equal bits on all of them, and with counted bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from slurmddp.collectives import ALGORITHMS, CountedLink, Link, ThreadLink, all_reduce, operations
from slurmddp.collectives.chunks import chunks
from slurmddp.collectives.cost_model import WORK, ClusterCosts, bus_bandwidth
from slurmddp.errors import ConfigError
from support.distributed import collective_jobs
from support.distributed.ranks import run_ranks

RANKS = range(1, 9)


def reduced(tensors: list[torch.Tensor], **options: Any) -> tuple[list[torch.Tensor], list[CountedLink]]:
    """Return the results of all ranks, each a thread, and their counted links."""
    links = [CountedLink(one) for one in ThreadLink.of_threads(len(tensors))]
    with ThreadPoolExecutor(len(tensors)) as threads:
        found = [
            threads.submit(all_reduce, tensor, link, **options)
            for tensor, link in zip(tensors, links, strict=True)
        ]
        return [one.result() for one in found], links


def drawn(ranks: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(-50, 50, shape, generator=generator).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", RANKS)
def test_c1_the_sum_for_any_length_and_dtype_with_equal_bits(algorithm: str, ranks: int) -> None:
    for shape in ((0,), (1,), (ranks - 1,), (ranks,), (2 * ranks + 1,), (3, 5, 7)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            tensors = drawn(ranks, shape, dtype)
            before = [tensor.clone() for tensor in tensors]
            results, _ = reduced(tensors, algorithm=algorithm)
            whole = torch.stack(before).sum(0)
            exact = dtype is not torch.bfloat16
            for result in results:
                assert torch.equal(result, results[0]) and result.dtype == dtype and result.shape == shape
                torch.testing.assert_close(result, whole, rtol=0 if exact else 0.1, atol=0 if exact else 2.0)
            assert all(map(torch.equal, tensors, before)), "the input does not change"


class WatchedLink(CountedLink):
    """Watches the memory of each message until its sender has waited for it."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.unfinished = 0

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        done, sent = super().send(tensor, to), tensor.clone()
        self.unfinished += 1

        def wait() -> None:
            assert torch.equal(tensor, sent), "the memory of a message changed before the message had left"
            self.unfinished -= 1
            done()

        return wait


def whole_parts(link: Link) -> list[torch.Tensor]:
    return [torch.full((3,), 10.0 * link.rank + part) for part in range(link.world_size)]


COLLECTIVES: dict[str, Callable[[Link], object]] = {
    **{name: lambda link, run=run: run(torch.arange(7.0), link) for name, run in ALGORITHMS.items()},
    "broadcast": lambda link: operations.broadcast(torch.ones(3), link, 0),
    "reduce": lambda link: operations.reduce(torch.ones(3), link, 0, torch.Tensor.add_),
    "all_to_all": lambda link: operations.all_to_all(whole_parts(link), whole_parts(link), link),
    "gather": lambda link: operations.gather(whole_parts(link), torch.ones(3), link, 0),
    "scatter": lambda link: operations.scatter(torch.ones(3), whole_parts(link), link, 0),
    "barrier": operations.barrier,
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_c1_a_rank_waits_for_each_message_before_it_changes_its_memory_or_returns(
    name: str, ranks: int
) -> None:
    links = [WatchedLink(one) for one in ThreadLink.of_threads(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(COLLECTIVES[name], links))
    assert [link.unfinished for link in links] == [0] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("algorithm", "uneven"), [("ring", 2), ("sharded_server", 7)])
def test_c2_a_rank_sends_the_least_possible_and_chunks_are_even(
    algorithm: str, uneven: int, ranks: int
) -> None:
    """A server sends its own chunk to all others, so one element more in it counts seven times on 8 ranks."""
    for elements in (ranks * 30, ranks * 30 + ranks // 2, 7):
        _, links = reduced(drawn(ranks, (elements,)), algorithm=algorithm)
        least = 2 * (ranks - 1) / ranks * elements
        for link in links:
            assert link.messages == 2 * (ranks - 1)
            assert abs(link.bytes / 4 - least) <= (0 if elements % ranks == 0 else uneven)
        sizes = [len(part) for part in chunks(torch.empty(elements), ranks)]
        assert sum(sizes) == elements and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_c2_the_busiest_rank_sends_what_the_cost_model_says(algorithm: str) -> None:
    for ranks in (2, 4, 8):
        size = 4 * 64 * ranks
        _, links = reduced(drawn(ranks, (size // 4,)), algorithm=algorithm)
        busiest = max(links, key=lambda link: link.bytes)
        told = WORK[algorithm](ranks, size)
        # In the tree and at the server, sending and receiving follow each other on rank 0.
        halves = 2 if algorithm in ("tree", "central_server") else 1
        assert (busiest.messages, busiest.bytes) == (told.messages / halves, told.sent / halves)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_c3_the_mean_of_the_ranks_and_nothing_on_top(algorithm: str) -> None:
    tensors = [torch.full((5,), float(rank)) for rank in range(4)]
    results, _ = reduced(tensors, algorithm=algorithm, mean=True)
    assert all(result.tolist() == [1.5] * 5 for result in results)


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("copied_devices", [set(), {"cpu"}], ids=["sent as they are", "copied as on GPUs"])
def test_every_algorithm_runs_over_gloo_on_odd_lengths(copied_devices: set[str]) -> None:
    for found in run_ranks(collective_jobs.sums, 3, copied_devices):
        assert found == {name: [[3.0], [6.0] * 2, [9.0] * 7] for name in ALGORITHMS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "rings"}, "no algorithm 'rings'"),
        ({"mean": True}, "mean of int64"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        all_reduce(torch.ones(2, dtype=torch.int64), ThreadLink.of_threads(1)[0], **options)


def test_the_cost_model_ranks_algorithms_by_size() -> None:
    machine = ClusterCosts(alpha_s=1e-5, beta_s=1e-9, gamma_s=1e-10)

    def fastest(ranks: int, size: float) -> str:
        return min(WORK, key=lambda name: WORK[name](ranks, size).seconds(machine))

    assert fastest(64, 1e3) in ("tree", "halving_doubling")
    assert fastest(64, 1e9) in ("ring", "sharded_server", "halving_doubling")
    seconds = WORK["ring"](64, 1e9).seconds(ClusterCosts(alpha_s=0, beta_s=1e-9, gamma_s=0))
    assert bus_bandwidth(1e9, 64, seconds) == pytest.approx(1e9)
