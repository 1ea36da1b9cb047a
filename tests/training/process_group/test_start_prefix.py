"""Ranks of a restart share a part of torchrun's store that holds nothing of earlier ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import SlurmddpError
from slurmddp.training.process_group.start_prefix import part_of_this_start

RANKS = 3


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def start(store: dist.Store, ranks: int = RANKS) -> list[dist.Store]:
    """Start all ranks at once; rank 0 comes last."""
    infos = [
        RankInfo(environment="torchrun", rank=rank, world_size=ranks, launch_id="fit")
        for rank in range(ranks)
    ]
    with ThreadPoolExecutor(ranks) as threads:
        found = [threads.submit(part_of_this_start, store, info, 20.0) for info in reversed(infos)]
        return [one.result() for one in reversed(found)]


def test_a_restart_reads_nothing_of_the_ranks_before(store: dist.Store) -> None:
    for number, ranks in enumerate((3, 3, 2, 4)):
        parts = start(store, ranks)
        assert not any(part.check(["address"]) for part in parts)
        parts[-1].set("address", f"of start {number}")
        assert all(part.get("address") == f"of start {number}".encode() for part in parts)


def test_one_rank_needs_no_part(store: dist.Store) -> None:
    assert part_of_this_start(store, RankInfo(environment="torchrun", launch_id="fit"), 1.0) is store


@pytest.mark.parametrize(
    ("rank", "message"), [(0, "2 of 3 ranks have not started"), (1, "Rank 0 has not started")]
)
def test_ranks_of_an_earlier_start_are_no_answer(store: dist.Store, rank: int, message: str) -> None:
    start(store)
    store.set_timeout(timedelta(seconds=1))
    info = RankInfo(environment="torchrun", rank=rank, world_size=RANKS, launch_id="fit")
    with pytest.raises(SlurmddpError, match=message):
        part_of_this_start(store, info, 0.3)
