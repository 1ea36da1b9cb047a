"""Ranks compute on devices of one kind, each on one of its own, or all stop and say who did not fit."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import EXIT_CONFIG, EXIT_FAILED, SlurmddpError
from slurmddp.runs.failures.causes import reads_like_a_lost_peer
from slurmddp.training.process_group import cpu_affinity, device_agreement, setup
from slurmddp.training.process_group.device_agreement import DeviceReport, DevicesError, judge, settle
from slurmddp.training.process_group.signed_store import SignedStore
from support.distributed import device_jobs
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
def test_devices_that_go_together(given: list[DeviceReport]) -> None:
    assert judge(given) is None


def test_two_ranks_with_one_gpu_are_told_apart_by_nobody() -> None:
    found = judge(on_gpus("GPU-1", "GPU-2", "GPU-3", "GPU-2"))
    assert found is not None
    assert found.text == "Rank 3 on n2: it was given cuda GPU-2, which rank 1 has already."
    assert "--gpus-per-node=2" in found.hint
    assert found.nodes == []


@pytest.mark.parametrize("cpus", [1, 3])
def test_ranks_on_cpus_beside_ranks_on_gpus_are_the_odd_ones(cpus: int) -> None:
    odd = DeviceReport(node=1, host="n2", backend="gloo", unfit=True)
    found = judge([GPU] * 2 + [odd] * cpus)
    assert found is not None
    assert found.text.startswith("Rank 2 on n2: it computes on cpu with gloo, others on cuda with nccl.")
    assert ("So it is with 2 more rank(s), on n2." in found.text) == (cpus == 3)
    assert found.nodes == [1]


def test_who_has_no_device_comes_before_all_else() -> None:
    lacks = DeviceReport(node=1, host="n2", trouble="2 ranks see 1 GPU(s).", hint="Ask for more.", unfit=True)
    found = judge([*on_gpus("GPU-1", "GPU-1"), lacks, replace(lacks, node=2, host="n3", unfit=False)])
    assert found is not None
    assert found.text == "Rank 2 on n2: 2 ranks see 1 GPU(s). So it is with 1 more rank(s), on n3."
    assert (found.hint, found.nodes) == ("Ask for more.", [1])


def test_a_refusal_does_not_read_like_the_loss_of_a_peer() -> None:
    odd = DeviceReport(node=1, host="n2", backend="gloo")
    error = DevicesError(judge([GPU, odd]))
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
def test_all_ranks_hear_at_once_who_does_not_fit(job, code: int, words: str, rank: int) -> None:
    told = run_ranks(job, 2, rank)
    at_fault = 1 - rank if job is device_jobs.with_a_gpu_for_one else rank
    assert [one[:2] for one in told] == [("DevicesError", code)] * 2
    assert {one[2] for one in told} == {told[0][2]}
    assert told[0][2].startswith(f"Rank {at_fault} on ")
    assert words in told[0][2]


@pytest.mark.usefixtures("rank_server")
def test_ranks_that_fit_go_on() -> None:
    assert [one[:3] for one in run_ranks(device_jobs.with_nothing_wrong, 2)] == [("", 0, "")] * 2


def test_a_rank_that_says_nothing_is_named() -> None:
    with pytest.raises(SlurmddpError, match="Rank 1, 3 met the others, but did not say"):
        store = SignedStore(dist.HashStore(), "1.0.0")
        store.set("slurmddp/claims/2", "{}")
        settle(store, 0, 4, GPU, patience_s=0.05)


def test_a_rank_zero_that_says_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_agreement, "READ_S", 0.0)
    with pytest.raises(SlurmddpError, match="Rank 0 went away, or did not say"):
        settle(SignedStore(dist.HashStore(), "1.0.0"), 1, 2, GPU, patience_s=0.05)


MIG = "MIG-a,MIG-b"


@pytest.mark.parametrize(("names", "shared"), [("0,1", True), (MIG, False)])
def test_two_ranks_on_one_gpu_are_refused_and_two_parts_of_it_are_not(
    monkeypatch: pytest.MonkeyPatch, names: str, shared: bool
) -> None:
    properties = type("Properties", (), {"uuid": "GPU-5"})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = []
    for name in names.split(","):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
        found.append(replace(GPU, identity=setup._identity(torch.device("cuda", 0))))
    refusal = judge(found)
    assert (refusal is not None) == shared
    assert not shared or "GPU-5, which rank 0 has already" in refusal.text


NODE = RankInfo(
    environment="slurm", rank=5, local_rank=1, node_rank=2, world_size=6, local_world_size=2, nodes=3
)


@pytest.mark.parametrize(
    ("granted", "visible", "by_agent", "unfit"),
    [
        (2, 1, True, True),
        (2, 2, True, False),
        (2, 1, False, False),
        (1, 1, True, False),
        (None, 1, True, False),
    ],
)
def test_a_node_is_unfit_that_shows_less_than_was_given(
    monkeypatch: pytest.MonkeyPatch, granted: int | None, visible: int, by_agent: bool, unfit: bool
) -> None:
    monkeypatch.delenv("SLURMDDP_RESTART_COUNT", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if by_agent:
        monkeypatch.setenv("SLURMDDP_RESTART_COUNT", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert setup._lacks_gpus(replace(NODE, gpus_on_node=granted)) == unfit


def test_a_gpu_that_raises_is_its_nodes_fault_and_a_wrong_number_the_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(info: RankInfo, undo: contextlib.ExitStack) -> int:
        raise RuntimeError("CUDA error: system not yet initialized\nmore")

    monkeypatch.setattr(setup, "_choose_device", raises)
    _, _, claim = setup._claim_device(NODE, "auto", contextlib.ExitStack())
    assert (claim.node, claim.unfit) == (2, True)
    assert claim.trouble == "its GPU can't be used: CUDA error: system not yet initialized"
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _, _, claim = setup._claim_device(NODE, "nccl", contextlib.ExitStack())
    assert (claim.unfit, "backend=nccl needs a GPU" in claim.trouble) == (False, True)


def test_alone_a_rank_raises_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SlurmddpError, match="backend=nccl"):
        setup.start(RankInfo(environment="single"), backend="nccl")


def test_a_gpu_that_does_not_answer_is_left_to_its_own_rank_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        if index == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert cpu_affinity._gpu_numa_nodes(NODE) == []


def test_pretended_nodes_that_compute_on_cpus_beside_gpus_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    setup._claim_device(replace(NODE, emulated=True), "auto", contextlib.ExitStack())
    assert "6 ranks on pretended nodes, 2 GPU(s): computing on the CPU" in caplog.text
