"""Ranks of an agent take their share of the processors, and restore it."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.cpu_shares import read_cpus, share_of
from slurmddp.training.device import cpu_affinity

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("together", [True, False])
def test_ranks_of_an_agent_take_their_share_of_the_cpus_and_restore_it(monkeypatch, together, caplog):
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", str(len(before)))
    if together:
        monkeypatch.setenv("SLURMDDP_RESTART_COUNT", "0")
    else:
        monkeypatch.delenv("SLURMDDP_RESTART_COUNT", raising=False)
    info = RankInfo(environment="slurm", world_size=2, local_world_size=2, cpus=4 * len(before))
    with contextlib.ExitStack() as undo:
        cpu_affinity.take_cpus(info, undo)
        own = share_of(read_cpus(allowed=before), 0, 2) if together else before
        assert os.sched_getaffinity(0) == own
        assert int(os.environ["OMP_NUM_THREADS"]) == torch.get_num_threads() <= len(own)
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() == threads
    (warned,) = caplog.messages
    assert f"SLURM promises {len(before) * (8 if together else 4)} CPU(s)" in warned


def test_a_gpu_that_does_not_answer_is_reported_by_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        if index == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert cpu_affinity._gpu_numa_nodes(RankInfo(environment="slurm", world_size=2, local_world_size=2)) == []
