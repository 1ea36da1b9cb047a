"""All ranks compute on devices of one kind, each on its own device, or all raise the same error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import EXIT_CONFIG, EXIT_FAILED, RankFailure, SlurmddpError
from slurmddp.runs.failures.causes import reads_like_a_lost_peer
from slurmddp.training.device import cuda
from slurmddp.training.process_group import device_agreement, setup, signed_store
from slurmddp.training.process_group.device_agreement import (
    DeviceReport,
    agree_on_devices,
    find_conflict,
)
from slurmddp.training.process_group.signed_store import SignedStore
from support.distributed import device_jobs
from support.distributed.meetings import rank
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed]

GPU = DeviceReport(node=0, host="n1", kind="cuda", backend="nccl")


def on_gpus(*identities: str, each: int = 2) -> list[DeviceReport]:
    return [
        replace(GPU, node=rank // each, host=f"n{rank // each + 1}", identity=identity)
        for rank, identity in enumerate(identities)
    ]


@pytest.mark.parametrize(
    "given",
    [
        on_gpus("GPU-1", "GPU-2", "GPU-3", "GPU-4"),
        on_gpus("", "", "", ""),
        [DeviceReport(node=0, host="n1", backend="gloo")] * 3,
    ],
)
def test_devices_without_a_conflict(given: list[DeviceReport]) -> None:
    assert find_conflict(given) is None


def test_two_ranks_with_one_gpu_are_a_conflict() -> None:
    found = find_conflict(on_gpus("GPU-1", "GPU-2", "GPU-3", "GPU-2"))
    assert found is not None
    assert found.message == "Rank 3 on n2: it was given cuda GPU-2, which rank 1 has already."
    assert "--gpus-per-node=2" in found.hint
    assert found.nodes == ()


@pytest.mark.parametrize("cpus", [1, 3])
def test_ranks_on_cpus_beside_ranks_on_gpus_are_a_conflict(cpus: int) -> None:
    odd = DeviceReport(node=1, host="n2", backend="gloo", unhealthy=True)
    found = find_conflict([GPU] * 2 + [odd] * cpus)
    assert found is not None
    assert found.message.startswith("Rank 2 on n2: it computes on cpu with gloo, others on cuda with nccl.")
    assert ("The same holds for 2 more rank(s), on n2." in found.message) == (cpus == 3)
    assert found.nodes == (1,)


def test_a_rank_without_a_device_is_named_before_any_other_conflict() -> None:
    lacks = DeviceReport(
        node=1, host="n2", trouble="2 ranks see 1 GPU(s).", hint="Ask for more.", unhealthy=True
    )
    found = find_conflict(
        [*on_gpus("GPU-1", "GPU-1"), lacks, replace(lacks, node=2, host="n3", unhealthy=False)]
    )
    assert found is not None
    assert found.message == "Rank 2 on n2: 2 ranks see 1 GPU(s). The same holds for 1 more rank(s), on n3."
    assert (found.hint, found.nodes) == ("Ask for more.", (1,))


def test_a_conflict_does_not_read_like_the_loss_of_a_peer() -> None:
    odd = DeviceReport(node=1, host="n2", backend="gloo")
    error = find_conflict([GPU, odd])
    assert error is not None
    lines = f"DevicesError: {error.message}\n{error.hint}".splitlines()
    assert not reads_like_a_lost_peer(lines)


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("job", "code", "words"),
    [
        (device_jobs.with_too_few_gpus, EXIT_CONFIG, "2 ranks on this node see 1 GPU(s). Ask for more."),
        (device_jobs.with_a_gpu_that_raises, EXIT_FAILED, "CUDA error: uncorrectable ECC error encountered "),
        (device_jobs.with_a_gpu_for_one, EXIT_CONFIG, "computes on cpu with gloo, others on cuda with nccl."),
    ],
)
def test_all_ranks_raise_the_same_conflict(job, code: int, words: str, rank: int) -> None:
    raised = run_ranks(job, 2, rank)
    at_fault = 1 - rank if job is device_jobs.with_a_gpu_for_one else rank
    assert raised == [("DevicesError", code, raised[0][2])] * 2
    assert raised[0][2].startswith(f"Rank {at_fault} on ")
    assert words in raised[0][2]


def test_a_rank_that_does_not_report_is_named() -> None:
    with pytest.raises(SlurmddpError, match="Rank 1, 3 met the others, but did not report"):
        store = SignedStore(dist.HashStore(), "1.0.0")
        store.set("slurmddp/devices/2", "{}")
        agree_on_devices(store, rank(0, 4), GPU, timeout_s=0.05)


def test_a_rank_zero_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_store, "_RANK_ZERO_S", 0.0)
    with pytest.raises(RankFailure, match="Rank 0 has exited, or sent no decision on the devices"):
        agree_on_devices(SignedStore(dist.HashStore(), "1.0.0"), rank(1, 2), GPU, timeout_s=0.05)


@pytest.mark.parametrize(("names", "shared"), [("0,1", True), ("MIG-a,MIG-b", False)])
def test_two_mig_devices_of_one_gpu_are_no_conflict(
    monkeypatch: pytest.MonkeyPatch, names: str, shared: bool
) -> None:
    properties = type("Properties", (), {"uuid": "GPU-5"})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = []
    for name in names.split(","):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
        found.append(replace(GPU, identity=cuda.identity_of(torch.device("cuda", 0))))
    conflict = find_conflict(found)
    assert (conflict is not None) == shared
    assert not shared or "GPU-5, which rank 0 has already" in conflict.message


def test_a_gpu_that_raises_is_the_nodes_fault_and_a_wrong_backend_the_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(info: RankInfo, backend: str) -> tuple[torch.device, str]:
        raise RuntimeError("CUDA error: system not yet initialized\nmore")

    monkeypatch.setattr(device_agreement, "take_device", raises)
    node = rank(1, 2, node_rank=2)
    _, _, report = device_agreement.report_device(node, "auto")
    assert (report.node, report.unhealthy) == (2, True)
    assert report.trouble == "its GPU can't be used: CUDA error: system not yet initialized"
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _, _, report = device_agreement.report_device(node, "nccl")
    assert (report.unhealthy, "backend=nccl needs a GPU" in report.trouble) == (False, True)


def test_a_single_rank_raises_its_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SlurmddpError, match="backend=nccl"):
        setup.start(RankInfo(environment="single"), backend="nccl")
