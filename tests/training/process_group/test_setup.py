"""Processes that take their rank from a launcher's variables, form a gloo group, and leave it."""

import json
import os
import socket
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.scrub import scrub
from slurmddp.errors import ConfigError, MismatchError, SlurmddpError
from slurmddp.host.cpu_shares import read_cpus
from slurmddp.training.distributon import Distributon
from slurmddp.training.process_group import setup
from support import TESTS
from support.distributed import device_jobs, group_jobs
from support.distributed.meetings import rank
from support.distributed.ranks import (
    Program,
    free_port,
    node_environments,
    place_environments,
    run_programs,
    run_ranks,
)

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


PROBE = str(TESTS / "support/distributed/place_probe.py")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def clean(**changes):
    kept = {name: value for name, value in scrub(os.environ).items() if name != "OMP_NUM_THREADS"}
    return {**kept, **NO_GPU, **changes}


def run_all(environments):
    """Run one probe per environment, side by side; return what each probe prints."""
    ended = run_programs([Program([PROBE], clean(**environ), TESTS) for environ in environments])
    assert [code for code, _ in ended] == [0] * len(ended), ended
    return [json.loads(output.splitlines()[-1]) for _, output in ended]


def test_two_nodes_with_two_ranks_each():
    environments = node_environments(2, 2, "/runs/a")
    for environ in environments:
        del environ["OMP_NUM_THREADS"]
    threads = max(1, read_cpus().usable // 4)
    assert run_all(environments) == [
        {
            "rank": rank,
            "environment": "slurm",
            "backend": "gloo",
            "device": "cpu",
            "total": 10.0,
            "interface": "lo",
            "threads": threads,
            "threads_before": ANY,
            "omp": str(threads),
            "undone": True,
        }
        for rank in range(4)
    ]


def test_two_runs_of_one_job_id_at_once_on_one_machine():
    found = run_all(node_environments(2, 1, "/runs/a") + node_environments(2, 1, "/runs/b"))
    assert [rank["total"] for rank in found] == [3.0] * 4


def test_ranks_that_launch_started_keep_the_variables_that_a_person_has_set():
    changes = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "3"}
    found = run_all([environ | changes for environ in place_environments(2)])
    assert {(rank["environment"], rank["total"], rank["undone"]) for rank in found} == {("local", 3.0, True)}
    assert {(rank["interface"], rank["omp"]) for rank in found} == {("lo", "3")}
    assert all(rank["threads"] == rank["threads_before"] for rank in found)


def test_d1_a_single_process_needs_no_group():
    (found,) = run_all([{}])
    assert (found["backend"], found["environment"], found["undone"]) == (None, "single", True)


def test_variables_set_by_hand_meet_at_the_given_port():
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = run_all([{"RANK": str(rank), **place} for rank in range(2)])
    assert [(rank["environment"], rank["total"], rank["undone"]) for rank in found] == [
        ("torchrun", 3.0, True)
    ] * 2


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def alone(**changes):
    return RankInfo(environment="single", **changes)


def test_one_rank_uses_its_cpus_and_restores_the_number_of_threads(no_gpu):
    before = torch.get_num_threads()
    place = setup.start(alone(cpus=1))
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert (place.device.type, place.backend, place.store) == ("cpu", None, None)
    setup.finish(place)
    assert torch.get_num_threads() == before
    assert "OMP_NUM_THREADS" not in os.environ


def test_rank_zero_keeps_the_store_open_until_all_ranks_have_left():
    zero, other = run_ranks(device_jobs.leave_one_after_the_other, 2)
    assert zero > other


def test_t3_an_unknown_backend_is_refused_before_the_rendezvous(no_gpu):
    with pytest.raises(ConfigError, match="'gllo'"):
        setup.start(rank(1), backend="gllo", rendezvous_timeout_s=600)


def test_an_unknown_interface_is_refused_before_the_rendezvous(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "surely0")
    with pytest.raises(MismatchError, match=r"GLOO_SOCKET_IFNAME='surely0' can't be used on .*no surely0"):
        setup.start(rank(0), backend="gloo", rendezvous_timeout_s=600)


def test_a_start_that_fails_leaves_nothing_changed(no_gpu):
    before, threads = dict(os.environ), torch.get_num_threads()
    with pytest.raises(SlurmddpError, match="rank 1"):
        setup.start(rank(0), rendezvous_timeout_s=0.2)
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads
    assert not dist.is_initialized()


def test_a_group_that_contradicts_the_environment_is_refused(tmp_path, monkeypatch):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with Distributon(1) as d:
            assert d.launch().world_size == 1
        assert dist.is_initialized()
        for name, value in place_environments(2)[1].items():
            monkeypatch.setenv(name, value)
        with pytest.raises(MismatchError, match=r"has rank 0 of 1, .* gives rank 1 of 2"):
            Distributon(2).launch()
    finally:
        dist.destroy_process_group()


def test_granted_gpus_that_torch_does_not_see_are_warned_of(no_gpu, caplog):
    setup.finish(setup.start(alone(gpus_on_node=4)))
    assert "SLURM granted 4 GPU(s), but torch sees none" in caplog.text


def test_a_narrowed_list_of_mig_devices_is_restored(no_gpu, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    context = setup.start(alone())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-a"
    setup.finish(context)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-a,MIG-b"


def test_g4_ranks_meet_by_tcp_and_by_a_file_and_a_missing_rank_is_named(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stale = f"file://{tmp_path}/store"
    for method in (stale, stale, f"tcp://127.0.0.1:{port}"):
        assert run_ranks(group_jobs.meets, 2, method, 200.0) == [1.0, 1.0], method
    three = place_environments(3)
    first, third = run_ranks(
        group_jobs.meets, 2, f"file://{tmp_path}/third", 2.0, environments=[three[0], three[2]]
    )
    assert "2 of 3 ranks have not started with rank 0: rank 1, 2." in first
    assert "Rank 0 has not started with rank 2." in third
    two, other = place_environments(2), place_environments(3)
    same = {"SLURMDDP_LAUNCH_ID": two[0]["SLURMDDP_LAUNCH_ID"]}
    fresh = f"file://{tmp_path}/fresh"
    found = run_ranks(group_jobs.meets, 2, fresh, 2.0, environments=[two[0], other[1] | same])
    assert "Rank 1 counts 3 ranks (WORLD_SIZE), rank 0 counts 2." in found[0]
    assert "Rank 0 counts 2 ranks (WORLD_SIZE), rank 1 counts 3." in found[1]


def test_t12_an_init_method_without_such_a_host_is_refused_at_once(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    d = Distributon(init_method="tcp://1720.30.23.101:29603", rendezvous_timeout_s=600)
    with pytest.raises(MismatchError, match=r"'1720.30.23.101', is not an IPv4 address"):
        d.launch()


@pytest.mark.parametrize(
    "method", ["tcp://host", "tcp://host:x", "file:name", "file://", "udp://a:1", "nonsense"]
)
def test_g4_an_init_method_that_is_none_is_refused(method):
    with pytest.raises(ConfigError, match="init_method is"):
        Distributon(init_method=method)
