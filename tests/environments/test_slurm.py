"""The rank info of a process in a job of SLURM: one mapping in, one RankInfo or one error out.

The environment of this process plays no part.
"""

import dataclasses

import pytest

from slurmddp.environments.detect import detect
from slurmddp.errors import MismatchError
from support.runs.slurm_environs import BATCH, FOUR_ON_TWO, without


def step(layout, nodes, rank, node_rank, local_rank, **changes):
    """Return the variables of one task of a step with this layout."""
    counts = [int(count) for count in layout.replace("(x2)", "").split(",")]
    total = str(sum(counts) * (2 if "(x2)" in layout else 1))
    values = {
        "SLURM_JOB_ID": "100",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": total,
        "SLURM_STEP_TASKS_PER_NODE": layout,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node_rank),
    }
    return {**values, **changes}


SLURM_LAYOUTS = {
    "two nodes, two tasks each": (
        FOUR_ON_TWO,
        {"rank": 3, "local_rank": 1, "node_rank": 1, "world_size": 4, "local_world_size": 2, "nodes": 2},
    ),
    "uneven tasks, last node": (
        step("4,1", "n[1-2]", 4, 1, 0),
        {"world_size": 5, "local_world_size": 1, "nodes": 2, "rank": 4},
    ),
    "uneven tasks, first node": (
        step("4,1", "n[1-2]", 2, 0, 2),
        {"world_size": 5, "local_world_size": 4, "local_rank": 2},
    ),
    "one node": (step("8", "gpu07", 5, 0, 5), {"world_size": 8, "nodes": 1, "hosts": ("gpu07",)}),
    "one task": (step("1", "gpu07", 0, 0, 0), {"world_size": 1, "local_world_size": 1}),
    "a step on one node of a larger job": (
        step(
            "2",
            "n2",
            1,
            0,
            1,
            SLURM_JOB_NODELIST="n[1-4]",
            SLURM_JOB_NUM_NODES="4",
            SLURM_NTASKS="2",
            SLURM_NNODES="1",
            SLURM_TASKS_PER_NODE="2",
            SLURMD_NODENAME="n2",
        ),
        {"world_size": 2, "nodes": 1, "hosts": ("n2",), "node_rank": 0, "launch_id": "100.1.0"},
    ),
    "cyclic distribution": (
        step("2(x2)", "n[1-2]", 1, 1, 0),
        {"rank": 1, "node_rank": 1, "local_rank": 0, "local_world_size": 2},
    ),
    "hosts in the order of a host file": (
        step("1(x2)", "n2,n1", 0, 0, 0),
        {"hosts": ("n2", "n1"), "nodes": 2},
    ),
    "several brackets and padding": (
        step("1(x2),1", "rack[1-1]n[09-10],login", 2, 2, 0, SLURM_STEP_NUM_TASKS="3"),
        {"hosts": ("rack1n09", "rack1n10", "login"), "nodes": 3},
    ),
    "an element of an array": (
        step("1", "n1", 0, 0, 0, SLURM_JOB_ID="105", SLURM_ARRAY_JOB_ID="100", SLURM_ARRAY_TASK_ID="7"),
        {"launch_id": "105.1.0"},
    ),
    "the last element of an array, whose id is the array's": (
        step("1", "n1", 0, 0, 0, SLURM_ARRAY_JOB_ID="100", SLURM_ARRAY_TASK_ID="0"),
        {"launch_id": "100.1.0"},
    ),
    "after two requeues": (step("1", "n1", 0, 0, 0, SLURM_RESTART_COUNT="2"), {"launch_id": "100.1.2"}),
    "the third set of ranks that an agent has started": (
        step("1", "n1", 0, 0, 0, SLURMDDP_LAUNCH_ID="again", SLURMDDP_RESTART_COUNT="2"),
        {"launch_id": "100.1.0.again.g2"},
    ),
    "told apart further by the launcher": (
        step("1", "n1", 0, 0, 0, SLURMDDP_LAUNCH_ID="again"),
        {"launch_id": "100.1.0.again"},
    ),
    "cpus and gpus": (
        step("2", "n1", 0, 0, 0, SLURM_CPUS_PER_TASK="6", SLURM_CPUS_ON_NODE="12", SLURM_GPUS_ON_NODE="2"),
        {"cpus": 6, "gpus_on_node": 2},
    ),
    "cpus of the node shared where the flag was not given": (
        step("4", "n1", 0, 0, 0, SLURM_CPUS_ON_NODE="14"),
        {"cpus": 3, "gpus_on_node": None},
    ),
    "old SLURM without step counts": (
        without(
            FOUR_ON_TWO,
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_NUM_NODES",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_TASKS_PER_NODE",
        ),
        {"world_size": 4, "local_world_size": 2, "hosts": ("n1", "n2")},
    ),
    "very old names": (
        {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_NODELIST": "n1",
            "SLURM_NPROCS": "2",
            "SLURM_TASKS_PER_NODE": "2",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
        },
        {"world_size": 2, "rank": 1, "hosts": ("n1",)},
    ),
    "rank 0's address given by a person": (
        step("1(x2)", "n[1-2]", 1, 1, 0, SLURMDDP_MASTER_ADDR="10.0.0.1"),
        {"master_addr": "10.0.0.1"},
    ),
    "an address for real nodes does not count for pretended ones": (
        step("1(x2)", "n[1-2]", 1, 1, 0, SLURMDDP_MASTER_ADDR="10.0.0.1", SLURMDDP_EMULATED="1"),
        {"master_addr": None, "emulated": True},
    ),
    "a MASTER_ADDR left over in the job is not the step's": (
        step("1(x2)", "n[1-2]", 1, 1, 0, MASTER_ADDR="login", MASTER_PORT="29500"),
        {"master_addr": None, "master_port": None},
    ),
    "a het job of one component": (step("1", "n1", 0, 0, 0, SLURM_HET_SIZE="1"), {"world_size": 1}),
    "srun wins over variables that the script set": (
        {**FOUR_ON_TWO, "RANK": "0", "WORLD_SIZE": "1", "PMI_RANK": "3", "PMI_SIZE": "4"},
        {"rank": 3},
    ),
}


@pytest.mark.parametrize("name", SLURM_LAYOUTS)
def test_d10_slurm_layout(name):
    environ, expected = SLURM_LAYOUTS[name]
    found = dataclasses.asdict(detect(environ))
    assert {key: found[key] for key in expected} == expected
    assert found["environment"] == "slurm"


CONTRADICTIONS = {
    "rank beyond the step": ({**FOUR_ON_TWO, "SLURM_PROCID": "4"}, "SLURM_PROCID=4", "--ntasks"),
    "node beyond the step": ({**FOUR_ON_TWO, "SLURM_NODEID": "2"}, "SLURM_NODEID=2", "--nodes"),
    "local rank beyond the node": (
        {**FOUR_ON_TWO, "SLURM_LOCALID": "2"},
        "SLURM_LOCALID=2",
        "--ntasks-per-node",
    ),
    "tasks do not add up": ({**FOUR_ON_TWO, "SLURM_STEP_NUM_TASKS": "5"}, "add up to 4", "--ntasks"),
    "fewer counts than hosts": (
        {**FOUR_ON_TWO, "SLURM_STEP_TASKS_PER_NODE": "4"},
        "2 host(s), task counts for 1",
        "--nodes",
    ),
    "another number of nodes": (
        {**FOUR_ON_TWO, "SLURM_STEP_NUM_NODES": "3"},
        "SLURM_STEP_NUM_NODES=3",
        "--nodes",
    ),
    "a heterogeneous job": ({**FOUR_ON_TWO, "SLURM_HET_SIZE": "2"}, "2 components", "hetjob"),
    "an old heterogeneous job": ({**FOUR_ON_TWO, "SLURM_PACK_SIZE": "3"}, "3 components", "hetjob"),
    "a step that leaked from another node": ({**FOUR_ON_TWO, "SLURMD_NODENAME": "n9"}, "node n9", "srun"),
    "a step that leaked from a job elsewhere": (
        {**FOUR_ON_TWO, "SLURM_JOB_NODELIST": "n[2-9]"},
        "the job has the nodes n2,n3,n4,n5,..., the step has n1,n2",
        "srun",
    ),
    "a step that leaked from a smaller job here": (
        {**FOUR_ON_TWO, "SLURM_NTASKS": "8"},
        "SLURM_NTASKS=8, but SLURM_STEP_NUM_TASKS=4",
        "SLURMDDP_ENVIRONMENT=slurm",
    ),
    "no number": ({**FOUR_ON_TWO, "SLURM_LOCALID": "one"}, "SLURM_LOCALID='one'", "SLURM_LOCALID"),
    "no local rank": (without(FOUR_ON_TWO, "SLURM_LOCALID"), "SLURM_LOCALID is not set", "srun"),
    "no layout": (
        without(FOUR_ON_TWO, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        "SLURM_TASKS_PER_NODE are not set",
        "srun",
    ),
    "mpirun inside a step": (
        {**FOUR_ON_TWO, "OMPI_COMM_WORLD_SIZE": "8"},
        "mpirun has started 8",
        "SLURMDDP_ENVIRONMENT=mpi",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_t12_contradictions_are_refused_with_what_was_found_and_the_flag(name):
    environ, found, flag = CONTRADICTIONS[name]
    with pytest.raises(MismatchError) as caught:
        detect(environ)
    assert found in caught.value.message
    assert flag in caught.value.hint
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    "environ",
    [
        BATCH,
        {**BATCH, "SLURM_STEP_ID": "4294967291"},
        {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1"},
        without(BATCH, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    ],
    ids=["batch script", "batch step", "interactive step of salloc", "salloc shell"],
)
def test_several_tasks_without_srun_are_refused_with_the_line_to_type(environ):
    with pytest.raises(MismatchError) as caught:
        detect(environ)
    assert "--ntasks=8" in caught.value.message
    assert "not started by srun" in caught.value.message
    assert "`srun python ...`" in caught.value.hint
    assert "SLURMDDP_ENVIRONMENT=single" in caught.value.hint


def test_several_nodes_without_a_number_of_tasks_need_srun_too():
    with pytest.raises(MismatchError, match="--nodes=2"):
        detect(without(BATCH, "SLURM_NTASKS"))
