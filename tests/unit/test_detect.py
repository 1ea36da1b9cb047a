"""Who am I? One mapping in, one RankInfo or one error out; this process's own environment plays no part."""

import dataclasses

import pytest

from slurmddp.environments.detect import detect, require
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, MismatchError

FOUR_ON_TWO = {
    "SLURM_JOB_ID": "100",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2,3",
    "SLURMD_NODENAME": "n2",
}


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


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


SLURM_LAYOUTS = {
    "two nodes, two tasks each": (
        FOUR_ON_TWO,
        {
            "rank": 3,
            "local_rank": 1,
            "node_rank": 1,
            "world_size": 4,
            "local_world_size": 2,
            "nodes": 2,
            "hosts": ("n1", "n2"),
            "launch_id": "100.0.0",
            "job_id": "100",
            "environment": "slurm",
        },
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
        {"job_id": "100_7", "launch_id": "105.1.0"},
    ),
    "the last element of an array, whose id is the array's": (
        step("1", "n1", 0, 0, 0, SLURM_ARRAY_JOB_ID="100", SLURM_ARRAY_TASK_ID="0"),
        {"job_id": "100_0", "launch_id": "100.1.0"},
    ),
    "after two requeues": (step("1", "n1", 0, 0, 0, SLURM_RESTART_COUNT="2"), {"launch_id": "100.1.2"}),
    "the third set of ranks that an agent has started": (
        step("1", "n1", 0, 0, 0, SLURMDDP_LAUNCH_ID="again", SLURMDDP_GENERATION="2"),
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
def test_slurm_layout(name):
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
    "another number of nodes": ({**FOUR_ON_TWO, "SLURM_STEP_NUM_NODES": "3"}, "3 node(s)", "--nodes"),
    "a heterogeneous job": ({**FOUR_ON_TWO, "SLURM_HET_SIZE": "2"}, "2 components", "hetjob"),
    "an old heterogeneous job": ({**FOUR_ON_TWO, "SLURM_PACK_SIZE": "3"}, "3 components", "hetjob"),
    "a step that leaked from another node": ({**FOUR_ON_TWO, "SLURMD_NODENAME": "n9"}, "node n9", "srun"),
    "a step that leaked from a job elsewhere": (
        {**FOUR_ON_TWO, "SLURM_JOB_NODELIST": "n[2-9]"},
        "the job has the nodes n2,n3,n4,n5,..., the step n1,n2",
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
        "mpirun says that there are 8",
        "SLURMDDP_ENVIRONMENT=mpi",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused_with_what_was_found_and_the_flag(name):
    environ, found, flag = CONTRADICTIONS[name]
    with pytest.raises(MismatchError) as caught:
        detect(environ)
    assert found in caught.value.message
    assert flag in caught.value.hint
    assert caught.value.exit_code == 78


BATCH = {
    "SLURM_JOB_ID": "100",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GPUS_ON_NODE": "4",
}


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


def test_one_task_in_a_batch_script_needs_no_srun():
    info = detect({**BATCH, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "8"})
    assert (info.environment, info.world_size, info.job_id) == ("single", 1, "100")
    assert (info.cpus, info.gpus_on_node) == (8, 4)


def test_a_whole_node_without_a_number_of_tasks_is_one_process():
    environ = without(BATCH, "SLURM_NTASKS")
    info = detect({**environ, "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "64"})
    assert info.environment == "single"


def test_a_person_may_say_single_inside_a_job():
    info = detect({**BATCH, "SLURMDDP_ENVIRONMENT": "single"})
    assert (info.environment, info.world_size) == ("single", 1)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
}


def test_torchrun_inside_a_step_is_the_innermost_launcher():
    info = detect({**FOUR_ON_TWO, **TORCHRUN})
    assert (info.environment, info.rank, info.world_size) == ("torchrun", 5, 8)
    assert (info.local_rank, info.local_world_size, info.node_rank, info.nodes) == (1, 4, 1, 2)
    assert (info.master_addr, info.master_port) == ("n1", 29400)
    assert info.launch_id == "none.1"
    assert info.job_id == "100"


def test_variables_set_by_hand_are_enough():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    info = detect(environ)
    assert (info.environment, info.rank, info.local_rank, info.local_world_size) == ("torchrun", 1, 1, 2)
    assert (info.nodes, info.node_rank) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"RANK": "8"}, "RANK=8 of WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 of LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE=9"),
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"RANK": "-1"}, "RANK='-1'"),
    ],
)
def test_torchrun_numbers_that_cannot_be(changes, found):
    with pytest.raises(MismatchError) as caught:
        detect({**TORCHRUN, **changes})
    assert found in caught.value.message


LOCAL = {
    "SLURMDDP_LAUNCHER": "local",
    "SLURMDDP_LAUNCH_ID": "abc",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "0",
}


def test_a_process_that_launch_started_knows_itself_inside_anything():
    info = detect({**BATCH, **TORCHRUN, **LOCAL})
    assert (info.environment, info.rank, info.world_size, info.launch_id) == ("local", 1, 2, "abc")
    assert info.master_port is None


def test_launch_must_name_itself():
    with pytest.raises(MismatchError, match="SLURMDDP_LAUNCH_ID"):
        detect(without(LOCAL, "SLURMDDP_LAUNCH_ID"))


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-n1-44@1",
    "SLURMDDP_MASTER_ADDR": "n1",
}
INTEL_MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_open_mpi():
    info = detect(OPEN_MPI)
    assert (info.environment, info.rank, info.world_size, info.nodes) == ("mpi", 3, 4, 2)
    assert (info.local_rank, info.local_world_size, info.node_rank) == (1, 2, 1)
    assert (info.master_addr, info.launch_id) == ("n1", "prterun-n1-44@1")


def test_mpirun_in_a_batch_script_is_no_missing_srun():
    assert detect({**BATCH, **OPEN_MPI}).environment == "mpi"


def test_intel_mpi_with_a_name_for_the_launch():
    info = detect({**INTEL_MPI, "SLURMDDP_LAUNCH_ID": "x"})
    assert (info.environment, info.rank, info.world_size, info.launch_id) == ("mpi", 1, 2, "x")


@pytest.mark.parametrize(
    ("environ", "found", "hint"),
    [
        (INTEL_MPI, "no name of their launch", "SLURMDDP_LAUNCH_ID"),
        (without(OPEN_MPI, "SLURMDDP_MASTER_ADDR"), "where rank 0 is", "SLURMDDP_MASTER_ADDR"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "rank 4 of 4", "OMPI_*"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "MPI_LOCALNRANKS are not set", "mpirun"),
    ],
)
def test_what_mpi_leaves_out_is_named(environ, found, hint):
    with pytest.raises(MismatchError) as caught:
        detect(environ)
    assert found in caught.value.message
    assert hint in caught.value.hint


def test_no_launcher_at_all():
    assert detect({}) == RankInfo(environment="single")


@pytest.mark.parametrize(
    ("forced", "environ", "environment"),
    [
        ("slurm", {**FOUR_ON_TWO, **TORCHRUN}, "slurm"),
        ("slurm", {**FOUR_ON_TWO, "SLURM_NTASKS": "8"}, "slurm"),
        ("torchrun", {**FOUR_ON_TWO, **without(TORCHRUN, "TORCHELASTIC_RUN_ID")}, "torchrun"),
        ("mpi", {**FOUR_ON_TWO, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8"}, "mpi"),
        ("single", FOUR_ON_TWO, "single"),
    ],
)
def test_a_person_decides(forced, environ, environment):
    assert detect({**environ, "SLURMDDP_ENVIRONMENT": forced}).environment == environment


def test_an_unknown_environment_lists_the_near_ones():
    with pytest.raises(ConfigError) as caught:
        detect({"SLURMDDP_ENVIRONMENT": "slrum"})
    assert "'slrum'" in caught.value.message
    assert "slurm" in caught.value.hint


def test_forced_slurm_outside_of_it_says_what_is_missing():
    with pytest.raises(MismatchError, match="SLURM_STEP_NUM_TASKS"):
        detect({"SLURMDDP_ENVIRONMENT": "slurm"})


STEP = RankInfo(
    environment="slurm",
    rank=3,
    local_rank=1,
    node_rank=1,
    world_size=4,
    local_world_size=2,
    nodes=2,
    hosts=("n1", "n2"),
    launch_id="100.0.0",
    gpus_on_node=2,
)


def test_what_fits_is_let_through():
    require(STEP)
    require(STEP, nodes=2, ranks_per_node=2, gpus_per_node=2, visible_gpus=2)
    require(STEP, gpus_per_node=1, visible_gpus=2)
    require(STEP, gpus_per_node=0, visible_gpus=0)


@pytest.mark.parametrize(
    ("asked", "found", "flag"),
    [
        ({"nodes": 3}, "nodes=3, but step 100.0.0 runs on 2", "--nodes=3"),
        ({"ranks_per_node": 4}, "4 task(s) on each of 2 node(s), 8 in all", "--ntasks-per-node=4"),
        ({"gpus_per_node": 8}, "granted 2 GPU(s)", "--gpus-per-node=8"),
        ({"gpus_per_node": 2, "visible_gpus": 1}, "torch sees 1 GPU(s)", "--gpu-bind=none"),
    ],
)
def test_what_does_not_fit_is_named_with_its_flag(asked, found, flag):
    with pytest.raises(MismatchError) as caught:
        require(STEP, **asked)
    assert found in caught.value.message
    assert flag in caught.value.hint


def test_an_uneven_step_is_no_even_configuration():
    uneven = dataclasses.replace(STEP, world_size=3)
    with pytest.raises(MismatchError, match="3 in all"):
        require(uneven, nodes=2, ranks_per_node=2)
