"""Data parallelism by readable algorithms: equal to DistributedDataParallel, and beside the backward pass."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from slurmddp.collectives import ALGORITHMS, ThreadLink
from slurmddp.errors import ConfigError
from slurmddp.strategies import build
from slurmddp.strategies.ring import Ring, ddp_hook
from support.distributed import collective_jobs
from support.distributed.ranks import run_ranks


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_c6_every_algorithm_and_shared_memory_train_the_weights_of_ddp() -> None:
    ways = ["gloo", "shm", "hierarchical", *ALGORITHMS]
    ranks = run_ranks(collective_jobs.trained, 3, ways)
    assert ranks[0] == ranks[1] == ranks[2], "replicas have equal bits"
    builtin, *others = ranks[0]
    for name, weights in zip(ways[1:], others, strict=True):
        assert weights == pytest.approx(builtin, rel=1e-5, abs=1e-6), name


def test_c6_buckets_are_averaged_in_their_order_while_the_backward_pass_goes_on() -> None:
    first, second = ThreadLink.of_threads(2)
    hooks = [ddp_hook("ring"), ddp_hook("ring")]

    def hand_over(rank: int, value: float, index: int) -> torch.futures.Future[torch.Tensor]:
        bucket = SimpleNamespace(buffer=lambda: torch.full((5,), value), index=lambda: index)
        return hooks[rank]((first, second)[rank], bucket)  # type: ignore[arg-type]

    early = [hand_over(0, 1.0, 0), hand_over(0, 10.0, 1)]
    assert not any(future.done() for future in early), "the hook waits for no other rank"
    late = [hand_over(1, 3.0, 0), hand_over(1, 30.0, 1)]
    for futures in (early, late):
        assert [future.wait().tolist() for future in futures] == [[2.0] * 5, [20.0] * 5]


def test_the_thread_ends_with_the_hook() -> None:
    (alone,) = ThreadLink.of_threads(1)
    before = set(threading.enumerate())
    hook = ddp_hook("ring")
    bucket = SimpleNamespace(buffer=lambda: torch.ones(3), index=lambda: 0)
    assert hook(alone, bucket).wait().tolist() == [1.0] * 3  # type: ignore[arg-type]
    (own,) = set(threading.enumerate()) - before
    del hook
    own.join(60)
    assert not own.is_alive()


def test_a_lost_peer_fails_the_backward_pass() -> None:
    class Broken(ThreadLink):
        def recv(self, tensor: torch.Tensor, source: int) -> None:
            raise ConnectionError(f"rank {source} is gone")

    link = Broken(0, ThreadLink.of_threads(2)[0]._boxes)
    bucket = SimpleNamespace(buffer=lambda: torch.ones(3), index=lambda: 0)
    future = ddp_hook("ring")(link, bucket)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        future.wait()


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.algorithm is 'rign'.*Did you mean ring"):
        build("ring", algorithm="rign")


def test_a_strategy_can_be_sent_to_ranks_before_it_has_a_model() -> None:
    assert isinstance(pickle.loads(pickle.dumps(Ring(algorithm="tree"))), Ring)
