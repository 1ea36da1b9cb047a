"""The GPU of a rank, as torch and CUDA_VISIBLE_DEVICES show it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from slurmddp.environments.rank_info import RankInfo
from slurmddp.training.device import cuda

pytestmark = pytest.mark.distributed

NODE = RankInfo(
    environment="slurm", rank=5, local_rank=1, node_rank=2, world_size=6, local_world_size=2, nodes=3
)
TWO_LOCAL = RankInfo(environment="torchrun", rank=1, local_rank=1, world_size=2, local_world_size=2)


def test_the_list_of_mig_devices_is_narrowed_before_cuda_is_asked(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    seen = []

    def device_count():
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return 1

    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    assert cuda.visible_gpus() == 2, "as many as the ranks of the node can share"
    assert seen == []
    assert cuda._choose_index(TWO_LOCAL) == 0
    assert seen == ["MIG-b"]


def test_whole_gpus_are_counted_by_torch(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cuda.visible_gpus() == 2
    assert cuda._choose_index(TWO_LOCAL) == 1


@pytest.mark.parametrize(("local_rank", "warnings"), [(0, 1), (1, 0)])
def test_gpus_of_other_jobs_are_warned_of_once_per_node(monkeypatch, caplog, local_rank, warnings):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    info = RankInfo(environment="slurm", local_rank=local_rank, local_world_size=2, gpus_on_node=2)
    assert cuda.take_device(info, "auto") == (torch.device("cuda", local_rank), "nccl")
    assert caplog.text.count("8 can be seen") == warnings


@pytest.mark.parametrize(
    ("granted", "visible", "by_agent", "lacks"),
    [
        (2, 1, True, True),
        (2, 2, True, False),
        (2, 1, False, False),
        (1, 1, True, False),
        (None, 1, True, False),
    ],
)
def test_a_node_lacks_gpus_that_shows_fewer_than_slurm_has_given(
    monkeypatch: pytest.MonkeyPatch, granted: int | None, visible: int, by_agent: bool, lacks: bool
) -> None:
    monkeypatch.delenv("SLURMDDP_RESTART_COUNT", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if by_agent:
        monkeypatch.setenv("SLURMDDP_RESTART_COUNT", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert cuda.lacks_gpus(replace(NODE, gpus_on_node=granted)) == lacks


def test_pretended_nodes_with_too_few_gpus_warn_that_they_use_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda.take_device(replace(NODE, emulated=True), "auto")
    assert "6 ranks on emulated nodes are more than the 2 GPU(s): computing on the CPU" in caplog.text
