"""The environment variables of processes that slurmddp starts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.environments.detect import detect, require
from slurmddp.environments.emit import emulated_step, rank_environment
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError


def agent_environment(nodes, node_rank, **changes):
    return {**emulated_step(nodes, node_rank, "77", "/runs/x", 0, 8), **changes}


def test_an_emulated_node_is_one_task_of_a_step():
    info = detect(emulated_step(3, 2, "77", "/runs/x", 1))
    assert (info.environment, info.rank, info.world_size) == ("slurm", 2, 3)
    assert (info.local_world_size, info.nodes, info.node_rank) == (1, 3, 2)
    assert info.hosts == ("localhost",) * 3
    assert info.emulated


def test_two_runs_and_two_attempts_of_one_job_id_do_not_meet():
    launches = {
        detect(emulated_step(2, 0, "77", run_dir, attempt)).launch_id
        for run_dir in ("/runs/a", "/runs/b")
        for attempt in (0, 1)
    }
    assert len(launches) == 4
    nodes = {detect(emulated_step(2, node, "77", "/runs/a", 0)).launch_id for node in range(2)}
    assert len(nodes) == 1


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 8))
def test_ranks_of_the_agents_fill_the_world_once(nodes, ranks_per_node):
    ranks = []
    for node_rank in range(nodes):
        environ = agent_environment(nodes, node_rank)
        node = detect(environ)
        for local_rank in range(ranks_per_node):
            info = detect({**environ, **rank_environment(node, local_rank, ranks_per_node)})
            require(info, nodes=nodes, ranks_per_node=ranks_per_node)
            assert (info.local_rank, info.node_rank, info.nodes) == (local_rank, node_rank, nodes)
            assert (info.world_size, info.launch_id) == (nodes * ranks_per_node, node.launch_id)
            ranks.append(info.rank)
    assert ranks == list(range(nodes * ranks_per_node))


def test_a_rank_sees_what_srun_would_have_set():
    node = RankInfo(
        environment="slurm", rank=1, node_rank=1, world_size=2, nodes=2, hosts=("n08", "n09"), cpus=16
    )
    values = rank_environment(node, 2, 4)
    assert values["SLURM_PROCID"] == values["RANK"] == "6"
    assert values["SLURM_LOCALID"] == values["LOCAL_RANK"] == "2"
    assert values["SLURM_NODEID"] == values["NODE_RANK"] == "1"
    assert values["SLURM_STEP_NUM_TASKS"] == values["SLURM_NTASKS"] == values["WORLD_SIZE"] == "8"
    assert values["SLURM_STEP_TASKS_PER_NODE"] == values["SLURM_TASKS_PER_NODE"] == "4(x2)"
    assert values["SLURM_NTASKS_PER_NODE"] == values["LOCAL_WORLD_SIZE"] == "4"
    assert values["SLURM_STEP_NODELIST"] == values["SLURM_NODELIST"] == "n[08-09]"
    assert values["SLURM_GTIDS"] == "4,5,6,7"
    assert values["SLURM_CPUS_PER_TASK"] == "4"


@pytest.mark.parametrize(
    ("inherited", "shown"),
    [
        ({}, {}),
        ({"SLURM_TRES_PER_TASK": "cpu=16"}, {"SLURM_TRES_PER_TASK": "cpu=4"}),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:2,cpu:16"}, {"SLURM_TRES_PER_TASK": "gres/gpu:2,cpu:4"}),
        ({"SLURM_TRES_PER_TASK": "gres/gpu=2"}, {}),
        ({"SRUN_CPUS_PER_TASK": "16", "SBATCH_CPUS_PER_TASK": "16"}, {"SRUN_CPUS_PER_TASK": "4"}),
    ],
)
def test_all_variables_that_tell_the_cpus_of_a_task_say_the_same(
    inherited: dict[str, str], shown: dict[str, str]
) -> None:
    """SLURM 24.11 refuses an srun in a rank where they differ."""
    node = RankInfo(environment="slurm", world_size=1, nodes=1, hosts=("n08",), cpus=16)
    values = rank_environment(node, 2, 4, inherited)
    cpus = {name: text for name, text in values.items() if name.endswith(("CPUS_PER_TASK", "TRES_PER_TASK"))}
    assert cpus == {"SLURM_CPUS_PER_TASK": "4"} | shown


def test_outside_slurm_a_rank_is_told_its_numbers_only():
    values = rank_environment(RankInfo(environment="single"), 1, 2)
    assert values == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
    }


@pytest.mark.parametrize(("local_rank", "ranks_per_node"), [(2, 2), (-1, 2), (0, 0)])
def test_a_local_rank_that_cannot_be_is_refused(local_rank, ranks_per_node):
    with pytest.raises(ConfigError, match="local_rank"):
        rank_environment(RankInfo(environment="single"), local_rank, ranks_per_node)


@pytest.mark.parametrize(("nodes", "node_rank"), [(1, 1), (2, -1), (0, 0)])
def test_a_node_rank_that_cannot_be_is_refused(nodes, node_rank):
    with pytest.raises(ConfigError, match="node_rank"):
        emulated_step(nodes, node_rank, "1", "/r", 0)
