"""Which GPU, which backend, how many threads: decisions about numbers, for layouts no test machine has."""

import dataclasses

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, MismatchError
from slurmddp.training.device import choose_backend, choose_device, choose_threads

NODE_OF_FOUR = RankInfo(
    environment="slurm", rank=6, local_rank=2, node_rank=1, world_size=8, local_world_size=4, nodes=2
)
TORCHRUN = dataclasses.replace(NODE_OF_FOUR, environment="torchrun")


def place(**changes):
    return dataclasses.replace(NODE_OF_FOUR, **changes)


@pytest.mark.parametrize(
    ("info", "environ", "visible", "index"),
    [
        (NODE_OF_FOUR, {}, 0, None),
        (NODE_OF_FOUR, {}, 4, 2),
        (NODE_OF_FOUR, {}, 8, 2),
        (NODE_OF_FOUR, {}, 1, 0),
        (place(gpus_on_node=4), {}, 1, 0),
        (place(gpus_on_node=1), {"SLURM_GPUS_PER_TASK": "1"}, 1, 0),
        (place(gpus_on_node=1), {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, 1, 0),
        (place(gpus_on_node=1), {"SLURM_GPU_BIND": "per_task:1"}, 1, 0),
        (place(gpus_on_node=1), {"SLURM_TRES_BIND": "gres/gpu:single:1"}, 1, 0),
        (RankInfo(environment="single"), {}, 1, 0),
        (RankInfo(environment="single"), {}, 8, 0),
        (TORCHRUN, {}, 4, 2),
    ],
)
def test_device(info, environ, visible, index):
    assert choose_device(info, environ, visible) == index


@pytest.mark.parametrize(
    ("info", "visible"),
    [(NODE_OF_FOUR, 2), (NODE_OF_FOUR, 3), (place(gpus_on_node=1), 1), (TORCHRUN, 1)],
)
def test_fewer_gpus_than_ranks_are_refused_with_the_flags(info, visible):
    with pytest.raises(MismatchError) as caught:
        choose_device(info, {}, visible)
    assert f"4 ranks on this node see {visible} GPU(s)" in caught.value.message
    assert "--gpus-per-node=4" in caught.value.hint
    assert "--gpu-bind=none" in caught.value.hint


def test_every_local_rank_has_its_own_gpu():
    assert [choose_device(place(local_rank=rank), {}, 4) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("asked", "index", "backend"),
    [
        ("auto", None, "gloo"),
        ("auto", 0, "nccl"),
        ("gloo", None, "gloo"),
        ("gloo", 1, "gloo"),
        ("nccl", 1, "nccl"),
    ],
)
def test_backend(asked, index, backend):
    assert choose_backend(asked, index) == backend


def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(MismatchError, match="backend=nccl") as caught:
        choose_backend("nccl", None)
    assert "--gpus-per-node" in caught.value.hint


def test_an_unknown_backend_lists_the_near_ones():
    with pytest.raises(ConfigError) as caught:
        choose_backend("glo", None, {"gloo", "nccl", "mine"})
    assert "gloo" in caught.value.hint
    assert choose_backend("mine", None, {"gloo", "mine"}) == "mine"


@pytest.mark.parametrize(
    ("changes", "usable_cpus", "threads"),
    [
        ({}, 32, 8),  # nothing known: an equal share of what this process may use
        ({}, 2, 1),
        ({"cpus": 8}, 32, 8),  # four ranks not bound to cores
        ({"cpus": 8}, 8, 8),  # each rank bound to its own cores
        ({"cpus": 8}, 1, 1),  # srun was not told about the CPUs
        ({"emulated": True}, 16, 2),  # all nodes are this machine
        ({"emulated": True, "cpus": 4}, 2, 1),
    ],
)
def test_threads(changes, usable_cpus, threads):
    assert choose_threads(place(**changes), usable_cpus) == threads
