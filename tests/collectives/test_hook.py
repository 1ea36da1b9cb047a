"""DistributedDataParallel with a backend or an algorithm of this room in place of its own all-reduce."""

from __future__ import annotations

import pytest

from slurmddp.collectives import ALGORITHMS
from support.distributed import collective_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


def test_c6_every_algorithm_and_shared_memory_train_the_weights_of_ddp() -> None:
    ways = ["gloo", "shm", *ALGORITHMS]
    ranks = run_ranks(collective_jobs.trained, 3, ways)
    assert ranks[0] == ranks[1] == ranks[2], "replicas have equal bits"
    builtin, *others = ranks[0]
    for name, weights in zip(ways[1:], others, strict=True):
        assert weights == pytest.approx(builtin, rel=1e-5, abs=1e-6), name
