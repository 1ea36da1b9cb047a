"""A process group over a link gives every collective of torch.distributed, and trains unmodified DDP."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from slurmddp.transports.link_group import LinkGroup
from support.distributed import group_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

OWN = "support.own.transport.Messages"


@pytest.mark.parametrize("backend", ["gloo", OWN])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_g1_every_collective_equals_a_local_reference(backend: str, ranks: int) -> None:
    assert run_ranks(group_jobs.every_collective, ranks, backend) == [backend.lower()] * ranks


def test_g2_a_transport_of_ones_own_trains_unmodified_ddp() -> None:
    (name, weights), *others = run_ranks(group_jobs.trained, 3, OWN)
    assert name == OWN.lower()
    assert all(other == (name, weights) for other in others), "equal bits on all ranks"
    _, wanted = run_ranks(group_jobs.trained, 3, "gloo")[0]
    torch.testing.assert_close(torch.tensor(weights), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


class Slow:
    rank, world_size = 0, 2

    def all_reduce(self, flat: torch.Tensor, op: object) -> None:
        time.sleep(0.3)


def test_a_program_that_never_destroys_its_group_waits_for_the_thread_at_its_exit() -> None:
    group = LinkGroup(Slow())
    group.allreduce([torch.ones(1)])
    [thread] = [one for one in threading.enumerate() if one.name == "slurmddp-link"]
    assert group._end.atexit
    group._end()
    assert not thread.is_alive()
