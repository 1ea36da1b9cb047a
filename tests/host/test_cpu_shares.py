"""The CPUs of each rank on many kinds of machines, from their files in /sys."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.cpu_shares import (
    Cpus,
    may_bind,
    numa_node_of,
    parse_cpu_list,
    read_cpus,
    share_of,
    shortage,
    threads_on,
)

RANK = RankInfo(environment="slurm", world_size=8, local_world_size=8, nodes=1, cpus=16)


def machine(sockets: int, cores: int, *, smt: bool, numa_per_socket: int = 1) -> Cpus:
    """Return a machine that numbers the first threads of all cores before the second threads."""
    real = sockets * cores
    count = real * (2 if smt else 1)
    size = cores // numa_per_socket
    numa = {cpu: cpu % real // size for cpu in range(count)}
    return Cpus(frozenset(range(count)), numa, {cpu: cpu % real for cpu in range(count)})


TWO_SOCKETS = machine(2, 64, smt=True)
EIGHT_NUMA = machine(1, 64, smt=False, numa_per_socket=8)
LAPTOP = Cpus(frozenset({0, 1}))


def numbers(text: str) -> frozenset[int]:
    return parse_cpu_list(text)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("\n", set()), ("", set())],
)
def test_lists_of_the_kernel(text: str, numbers: set[int]) -> None:
    assert parse_cpu_list(text) == numbers


def test_eight_ranks_on_two_sockets_take_sixteen_whole_cores_each() -> None:
    shares = [share_of(TWO_SOCKETS, rank, 8) for rank in range(8)]
    assert shares[0] == numbers("0-15,128-143")
    assert shares[4] == numbers("64-79,192-207"), "ranks 4 to 7 are on the second socket"
    assert [threads_on(TWO_SOCKETS, share) for share in shares] == [16] * 8
    assert frozenset().union(*shares) == TWO_SOCKETS.allowed


def test_eight_ranks_take_a_numa_node_each() -> None:
    shares = [share_of(EIGHT_NUMA, rank, 8) for rank in range(8)]
    assert [{EIGHT_NUMA.numa[cpu] for cpu in share} for share in shares] == [{rank} for rank in range(8)]


MANY = [
    (TWO_SOCKETS, 3),
    (EIGHT_NUMA, 5),
    (EIGHT_NUMA, 8),
    (LAPTOP, 1),
    (LAPTOP, 2),
    (Cpus(numbers("3,5-6,70,131-133"), TWO_SOCKETS.numa, TWO_SOCKETS.core), 4),
    (machine(1, 4, smt=True), 6),
]


@pytest.mark.parametrize(("cpus", "ranks"), MANY)
def test_no_two_ranks_share_a_cpu_and_none_is_left_over(cpus: Cpus, ranks: int) -> None:
    shares = [share_of(cpus, rank, ranks) for rank in range(ranks)]
    assert all(shares)
    assert all(not share & other for share, other in itertools.combinations(shares, 2))
    assert frozenset().union(*shares) == cpus.allowed
    sizes = [threads_on(cpus, share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_an_allocation_with_holes_is_dealt_out_by_cores() -> None:
    cpus = Cpus(numbers("2-3,9,66-67,130,137"), TWO_SOCKETS.numa, TWO_SOCKETS.core)
    assert cpus.cores() == [(2, 130), (3,), (9, 137), (66,), (67,)]
    assert [sorted(share_of(cpus, rank, 2)) for rank in range(2)] == [[2, 3, 130], [9, 66, 67, 137]]
    assert threads_on(cpus, share_of(cpus, 1, 2)) == 3


def test_more_ranks_than_cpus_share_them_all() -> None:
    assert [share_of(LAPTOP, rank, 3) for rank in range(3)] == [LAPTOP.allowed, {0}, {1}]
    assert threads_on(LAPTOP, {0}) == 1


def test_ranks_sit_beside_their_gpus() -> None:
    gpus = [1, 1, 0, 0]
    shares = [share_of(TWO_SOCKETS, rank, 4, gpus) for rank in range(4)]
    assert [{TWO_SOCKETS.numa[cpu] for cpu in share} for share in shares] == [{1}, {1}, {0}, {0}]
    assert frozenset().union(*shares) == TWO_SOCKETS.allowed


@pytest.mark.parametrize("gpus", [[1, 1, 0, None], [1, 1, 1, 1, 0], [7, 7, 7, 7], [0, 0, 0, 0]])
def test_gpus_that_would_leave_a_rank_without_cores_are_not_followed(gpus: list[int | None]) -> None:
    cpus = Cpus(numbers("0,64-66"), TWO_SOCKETS.numa, TWO_SOCKETS.core)
    assert [share_of(cpus, rank, 4, gpus) for rank in range(4)] == [{0}, {64}, {65}, {66}]


AGENT = {"SLURMDDP_RESTART_COUNT": "0", "SLURM_CPUS_ON_NODE": "256"}


@pytest.mark.parametrize(
    ("changes", "environ", "cpus", "bound"),
    [
        ({}, AGENT, TWO_SOCKETS, True),
        ({}, AGENT | {"SLURM_CPUS_ON_NODE": "8"}, Cpus(numbers("4-11"), TWO_SOCKETS.numa), True),
        ({}, AGENT | {"SLURM_CPUS_ON_NODE": "8"}, TWO_SOCKETS, False),  # not confined: others' CPUs too
        ({}, AGENT | {"SLURM_CPUS_ON_NODE": "512"}, TWO_SOCKETS, False),  # a sandbox's nodes share a machine
        ({}, AGENT | {"SLURM_CPUS_ON_NODE": ""}, TWO_SOCKETS, False),
        ({}, AGENT | {"SLURMDDP_BIND": "off"}, TWO_SOCKETS, False),
        ({}, AGENT | {"OMP_PROC_BIND": "close"}, TWO_SOCKETS, False),
        ({}, {"SLURM_CPUS_ON_NODE": "256"}, TWO_SOCKETS, False),  # without an agent, srun has bound the tasks
        ({"emulated": True}, AGENT, TWO_SOCKETS, False),
        ({"environment": "torchrun"}, AGENT, TWO_SOCKETS, False),
    ],
)
def test_ranks_are_bound_where_the_cpus_are_theirs_alone(
    changes: dict[str, object], environ: dict[str, str], cpus: Cpus, bound: bool
) -> None:
    info = dataclasses.replace(RANK, **changes)  # type: ignore[arg-type]
    assert may_bind(info, environ, cpus) is bound


@pytest.mark.parametrize(
    ("cpus", "together", "warning"),
    [
        (machine(1, 128, smt=False), True, None),
        (Cpus(numbers("0-15"), TWO_SOCKETS.numa), False, None),
        (
            Cpus(numbers("0"), TWO_SOCKETS.numa),
            False,
            "16 CPU(s) to this rank, but the processes are bound to 1: `srun`",
        ),
        (
            Cpus(numbers("0-63"), TWO_SOCKETS.numa),
            True,
            "128 CPU(s) to the ranks of this node, but the processes are bo",
        ),
        (
            machine(1, 64, smt=False),
            True,
            "128 CPU(s) to the ranks of this node, but this machine has 64: the config",
        ),
        (
            dataclasses.replace(TWO_SOCKETS, quota=3.5),
            True,
            "a control group (cpu.max) lets them use 3: raise the l",
        ),
    ],
)
def test_fewer_cpus_than_promised_are_reported_in_one_line(
    cpus: Cpus, together: bool, warning: str | None
) -> None:
    line = shortage(RANK, cpus, together)
    assert line is None if warning is None else warning in (line or "")


def test_an_unknown_number_of_cpus_promises_nothing() -> None:
    assert shortage(dataclasses.replace(RANK, cpus=None), LAPTOP, True) is None
    assert shortage(dataclasses.replace(RANK, emulated=True), LAPTOP, True) is None


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.fsencode(text))
    return root


SYS = "sys/devices/system"


def test_a_machine_is_read(tmp_path: Path) -> None:
    topology = {
        f"{SYS}/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}\n" for cpu in range(4)
    }
    nodes = {
        f"{SYS}/node/node0/cpulist": "0,2\n",
        f"{SYS}/node/node1/cpulist": "1,3\n",
        f"{SYS}/node/online": "0-1",
    }
    device = {
        "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
        "sys/bus/pci/devices/0000:3c:00.0/numa_node": "-1\n",
    }
    root = write(tmp_path, topology | nodes | device)
    cpus = read_cpus(root, {0, 1, 3})
    assert cpus == Cpus(frozenset({0, 1, 3}), {0: 0, 2: 0, 1: 1, 3: 1}, {0: 0, 1: 1, 3: 1})
    assert [numa_node_of(f"0000:{bus}:00.0", root) for bus in ("3b", "3c", "3d")] == [1, None, None]


def test_a_quota_limits_the_usable_processors(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/job/cpu.max": "350000 100000\n",
    }
    cpus = read_cpus(write(tmp_path, files), {0, 1, 2, 3})
    assert (cpus.quota, cpus.usable) == (3.5, 3)
    (tmp_path / "sys/fs/cgroup/job/cpu.max").write_text("50000 100000\n")
    assert read_cpus(tmp_path, {0, 1}).usable == 1
    (tmp_path / "sys/fs/cgroup/job/cpu.max").write_text("max 100000\n")
    assert read_cpus(tmp_path, {0, 1}).usable == 2


def test_this_machine_is_read() -> None:
    cpus = read_cpus()
    assert cpus.allowed
    assert set(cpus.core) <= set(cpus.allowed)
