"""The choice of GPU, backend and number of threads, for node layouts that no test machine has."""

import dataclasses

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, MismatchError
from slurmddp.training.device.choice import (
    choose_backend,
    choose_device,
    choose_mig_device,
    choose_threads,
    foreign_gpus,
)
from slurmddp.training.device.visible_devices import (
    device_identity,
    visible_names,
)

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
        (NODE_OF_FOUR, {}, 1, 0),
        (place(gpus_on_node=1), {"SLURMD_TRES_BIND": "gpu:per_task:1"}, 1, 0),
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
    assert "no `--gpu-bind`" in caught.value.hint


BINDINGS = [
    # options of srun, SLURMD_TRES_BIND, GPUs that each of four ranks sees, chosen indices
    ("--gpus-per-node=4", None, 4, [0, 1, 2, 3]),
    ("--gpus-per-node=8", None, 8, [0, 1, 2, 3]),
    ("--gpus-per-task=1", "gpu:per_task:1", 1, [0, 0, 0, 0]),
    ("--gpus-per-task=2", "gpu:per_task:2", 2, [0, 0, 0, 0]),
    ("--gpus-per-task=2 from 23.02", "gres/gpu:per_task:2", 2, [0, 0, 0, 0]),
    ("--gpus-per-task=1 --gpu-bind=none", "gpu:none", 4, [0, 1, 2, 3]),
    ("--gpu-bind=verbose,per_task:2", "gres/gpu:verbose,per_task:2", 2, [0, 0, 0, 0]),
    ("--gpu-bind=single:1", "gpu:single:1", 1, [0, 0, 0, 0]),
    ("--ntasks-per-gpu=1", "gres/gpu:single:1", 1, [0, 0, 0, 0]),
    ("--gpu-bind=map_gpu:0,1,2,3", "gpu:map_gpu:0,1,2,3", 1, [0, 0, 0, 0]),
    ("--gpu-bind=mask_gpu:1,2,4,8", "gres/gpu:mask_gpu:0x1,0x2,0x4,0x8", 1, [0, 0, 0, 0]),
    ("--gpu-bind=closest, a GPU per socket", "gres/gpu:closest", 1, [0, 0, 0, 0]),
    ("--gpu-bind=closest, two per socket", "gres/gpu:closest", 2, None),
    ("--gpu-bind=none", "gres/gpu:none", 4, [0, 1, 2, 3]),
    ("--gpus-per-task=4, of which two are seen", "gres/gpu:per_task:4", 2, None),
    ("--tres-bind=gres/nic:per_task:2", "gres/nic:per_task:2", 2, None),
]


@pytest.mark.parametrize(
    ("binding", "visible", "indices"), [row[1:] for row in BINDINGS], ids=[b[0] for b in BINDINGS]
)
def test_each_way_to_bind_gpus(binding, visible, indices):
    environ = {"SLURMD_TRES_BIND": binding} if binding else {}
    ranks = [place(local_rank=rank, gpus_on_node=4) for rank in range(4)]
    if indices is not None:
        assert [choose_device(rank, environ, visible) for rank in ranks] == indices
        return
    for rank in ranks:
        with pytest.raises(MismatchError, match=f"4 ranks on this node see {visible}"):
            choose_device(rank, environ, visible)


@pytest.mark.parametrize(
    ("environ", "visible", "warned"),
    [
        ({"SLURMD_TRES_BIND": "gpu:none"}, 8, True),  # SLURM 22.05 names no devices then
        ({"SLURMD_TRES_BIND": "gpu:none"}, 4, False),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 8, False),
    ],
)
def test_gpus_that_may_belong_to_other_jobs_are_warned_of(environ, visible, warned):
    found = foreign_gpus(place(local_rank=0, gpus_on_node=4), environ, visible)
    assert (found is not None) == warned
    assert foreign_gpus(TORCHRUN, environ, visible) is None, "SLURM has given no GPU"
    assert found is None or ("has given 4 GPU(s)" in found and "8 can be seen" in found)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,1", ("0", "1")),
        (" 2, 3 ", ("2", "3")),
        ("0,-1,1", ("0",)),
        ("0,x,1", ("0",)),
        ("GPU-8932f937,GPU-5", ("GPU-8932f937", "GPU-5")),
        ("GPU-8932f937,1", ("GPU-8932f937",)),
        ("MIG-1a2b,MIG-3c4d", ("MIG-1a2b", "MIG-3c4d")),
        ("MIG-GPU-5/1/0,MIG-GPU-5/2/0", ("MIG-GPU-5/1/0", "MIG-GPU-5/2/0")),
        ("MIG-1a2b,GPU-5", ("MIG-1a2b",)),
    ],
)
def test_device_names_are_read_as_cuda_reads_them(text, names):
    assert visible_names({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) == names


@pytest.mark.parametrize("text", ["0,0", "GPU-5,GPU-6,GPU-5", "MIG-1,MIG-1"])
def test_a_device_that_is_named_twice_is_refused(text):
    with pytest.raises(MismatchError, match="twice, and CUDA then shows no device"):
        visible_names({"CUDA_VISIBLE_DEVICES": text})


def test_the_name_at_which_cuda_stops_is_in_the_message():
    with pytest.raises(
        MismatchError,
        match=r"see 1 GPU\(s\).*ignores 'x' and all names after it in CUDA_VISIBLE_DEVICES='0,x,2,3'",
    ):
        choose_device(TORCHRUN, {"CUDA_VISIBLE_DEVICES": "0,x,2,3"}, 1)


@pytest.mark.parametrize(
    "names", ["MIG-a,MIG-b,MIG-c,MIG-d", "MIG-GPU-5/1/0,MIG-GPU-5/2/0,MIG-GPU-6/1/0,MIG-GPU-6/2/0"]
)
def test_each_rank_sees_one_mig_device(names):
    environ = {"CUDA_VISIBLE_DEVICES": names}
    found = [choose_mig_device(place(local_rank=rank), environ) for rank in range(4)]
    assert found == names.split(",")
    alone = {"CUDA_VISIBLE_DEVICES": found[2], "SLURMD_TRES_BIND": "gres/gpu:per_task:1"}
    assert choose_mig_device(place(local_rank=2), alone) == found[2], "narrowed already"
    assert len({device_identity({"CUDA_VISIBLE_DEVICES": name}, 0, "GPU-5") for name in found}) == 4


def test_fewer_mig_devices_than_ranks_are_refused():
    with pytest.raises(MismatchError, match=r"4 ranks on this node see 2 GPU"):
        choose_mig_device(TORCHRUN, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"})


@pytest.mark.parametrize("text", [None, "", "0,1,2,3", "GPU-1,GPU-2,GPU-3,GPU-4"])
def test_whole_gpus_are_not_narrowed(text):
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert choose_mig_device(NODE_OF_FOUR, environ) is None
    assert device_identity(environ, 0, "uuid-of-0") == "uuid-of-0"


@pytest.mark.parametrize(
    ("asked", "index", "backend"),
    [
        ("auto", None, "gloo"), ("auto", 0, "nccl"), ("gloo", 1, "gloo"), ("mine", None, "mine"),
        ("cpu:gloo,cuda:nccl", 0, "cpu:gloo,cuda:nccl"),
        ("cpu:gloo, cuda:nccl", None, "cpu:gloo"), ("cpu:a.B", None, "cpu:a.B"),
    ],
)  # fmt: skip
def test_t3_backend(asked, index, backend):
    assert choose_backend(asked, index) == backend


@pytest.mark.parametrize(
    ("asked", "index", "error", "message"),
    [
        ("cuda:nccl", None, MismatchError, "no backend for cpu"),
        ("cpu:gloo", 0, MismatchError, "no backend for cuda"),
        ("cpu:gloo,cpu:nccl", None, ConfigError, "not a list of devices"),
        ("cpu:", None, ConfigError, "not a list of devices"),
        ("cpu:gloo,nccl", None, ConfigError, "not a list of devices"),
        ("cpu:gloo:nccl", None, ConfigError, "not a list of devices"),
    ],
)
def test_g3_a_device_string_without_this_device_or_malformed_is_refused(asked, index, error, message):
    with pytest.raises(error, match=message):
        choose_backend(asked, index)


def test_t3_nccl_without_a_gpu_is_refused():
    with pytest.raises(MismatchError, match="backend=nccl") as caught:
        choose_backend("nccl", None)
    assert "--gpus-per-node" in caught.value.hint


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


# Pretended nodes share the GPUs of this machine, or compute on its CPUs.


def places(nodes):
    """Return the ranks of nodes with two ranks each."""
    size = {"world_size": 2 * nodes, "local_world_size": 2, "nodes": nodes, "emulated": True}
    return [place(rank=rank, local_rank=rank % 2, node_rank=rank // 2, **size) for rank in range(2 * nodes)]


@pytest.mark.parametrize(
    ("visible", "taken"),
    [(0, [None] * 4), (1, [None] * 4), (2, [None] * 4), (4, [0, 1, 2, 3]), (8, [0, 1, 2, 3])],
)
def test_all_ranks_of_pretended_nodes_get_a_gpu_or_no_rank_does(visible, taken):
    assert [choose_device(place, {}, visible) for place in places(2)] == taken


def test_pretended_nodes_share_the_mig_devices():
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c,MIG-d"}
    assert [choose_mig_device(place, environ) for place in places(2)] == ["MIG-a", "MIG-b", "MIG-c", "MIG-d"]


def test_one_node_with_too_few_gpus_is_refused():
    with pytest.raises(MismatchError, match=r"2 ranks on this node see 1 GPU\(s\)"):
        choose_device(places(1)[0], {}, 1)
