"""Pretended nodes share the GPUs of one machine, or check_can_write on its CPUs."""

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError
from slurmddp.training.process_group.device import choose_device, own_mig_device


def places(nodes, each):
    return [
        RankInfo(
            environment="slurm",
            rank=rank,
            local_rank=rank % each,
            node_rank=rank // each,
            world_size=nodes * each,
            local_world_size=each,
            nodes=nodes,
            emulated=True,
        )
        for rank in range(nodes * each)
    ]


@pytest.mark.parametrize(
    ("visible", "taken"),
    [(0, [None] * 4), (1, [None] * 4), (2, [None] * 4), (4, [0, 1, 2, 3]), (8, [0, 1, 2, 3])],
)
def test_each_rank_of_all_pretended_nodes_has_a_gpu_of_its_own_or_none_has(visible, taken):
    assert [choose_device(place, {}, visible) for place in places(2, 2)] == taken


def test_mig_devices_are_dealt_out_over_all_pretended_nodes():
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c,MIG-d"}
    assert [own_mig_device(place, environ) for place in places(2, 2)] == ["MIG-a", "MIG-b", "MIG-c", "MIG-d"]


def test_a_run_on_this_machine_alone_is_no_rehearsal():
    assert [choose_device(place, {}, 2) for place in places(1, 2)] == [0, 1]
    with pytest.raises(MismatchError, match=r"2 ranks on this node see 1 GPU\(s\)"):
        choose_device(places(1, 2)[0], {}, 1)
