"""The rank under other launchers than srun; the size of the configuration against the size of the step."""

import dataclasses

import pytest

from slurmddp.environments.detect import detect, require
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, MismatchError
from support.runs.slurm_environs import BATCH, FOUR_ON_TWO, without

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


BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "29400"}


@pytest.mark.parametrize("more", [{}, {"LOCAL_RANK": "1"}], ids=str)
def test_variables_set_by_hand_must_say_how_many_ranks_a_machine_has_where_there_may_be_several(more):
    with pytest.raises(MismatchError, match="LOCAL_WORLD_SIZE"):
        detect({**BY_HAND, **more})


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


DETECTED = {
    "torchrun inside a step": (
        {**FOUR_ON_TWO, **TORCHRUN},
        {"environment": "torchrun", "rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4,
         "node_rank": 1, "nodes": 2, "master_addr": "n1", "master_port": 29400, "launch_id": "none"},
    ),
    "by hand on this machine": (
        {**BY_HAND, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        {"environment": "torchrun", "rank": 1, "local_rank": 1, "local_world_size": 2, "nodes": 1},
    ),
    "by hand on several machines": (
        {**BY_HAND, "LOCAL_WORLD_SIZE": "1"},
        {"local_rank": 0, "node_rank": 1, "nodes": 4},
    ),
    "by hand alone": ({**BY_HAND, "RANK": "0", "WORLD_SIZE": "1"}, {"local_rank": 0, "nodes": 1}),
    "launch inside anything": (
        {**BATCH, **TORCHRUN, **LOCAL},
        {"environment": "local", "rank": 1, "world_size": 2, "launch_id": "abc", "master_port": None},
    ),
    "Open MPI": (
        OPEN_MPI,
        {"environment": "mpi", "rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2,
         "node_rank": 1, "nodes": 2, "master_addr": "n1", "launch_id": "prterun-n1-44@1"},
    ),
    "mpirun in a batch script is no missing srun": ({**BATCH, **OPEN_MPI}, {"environment": "mpi"}),
    "Intel MPI with a name for the launch": (
        {**INTEL_MPI, "SLURMDDP_LAUNCH_ID": "x"},
        {"environment": "mpi", "rank": 1, "world_size": 2, "launch_id": "x"},
    ),
    "one task in a batch script": (
        {**BATCH, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "8"},
        {"environment": "single", "world_size": 1, "cpus": 8, "gpus_on_node": 4},
    ),
    "a whole node without a number of tasks": (
        {**without(BATCH, "SLURM_NTASKS"), "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "64"},
        {"environment": "single"},
    ),
    "no launcher": ({}, dataclasses.asdict(RankInfo(environment="single"))),
}  # fmt: skip


@pytest.mark.parametrize("name", DETECTED)
def test_the_rank_under_each_launcher(name):
    environ, expected = DETECTED[name]
    found = dataclasses.asdict(detect(environ))
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("environ", "found", "hint"),
    [
        (INTEL_MPI, "no variable that identifies this launch", "SLURMDDP_LAUNCH_ID"),
        (without(OPEN_MPI, "SLURMDDP_MASTER_ADDR"), "the host of rank 0", "SLURMDDP_MASTER_ADDR"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "rank 4 of 4", "OMPI_*"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "MPI_LOCALNRANKS are not set", "mpirun"),
    ],
)
def test_what_mpi_leaves_out_is_named(environ, found, hint):
    with pytest.raises(MismatchError) as caught:
        detect(environ)
    assert found in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("forced", "environ", "environment"),
    [
        ("slurm", {**FOUR_ON_TWO, **TORCHRUN}, "slurm"),
        ("slurm", {**FOUR_ON_TWO, "SLURM_NTASKS": "8"}, "slurm"),
        ("torchrun", {**FOUR_ON_TWO, **without(TORCHRUN, "TORCHELASTIC_RUN_ID")}, "torchrun"),
        ("mpi", {**FOUR_ON_TWO, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8"}, "mpi"),
        ("single", FOUR_ON_TWO, "single"),
        ("single", BATCH, "single"),
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


def refusal_of(changes, asked):
    """Return the error for a step with `changes`, or None if it fits what was asked."""
    try:
        require(dataclasses.replace(STEP, **changes), **asked)
    except MismatchError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, {}),
        ({}, {"nodes": 2, "ranks_per_node": 2, "gpus_per_node": 2}),
        ({}, {"gpus_per_node": 1}),
        ({}, {"gpus_per_node": 0}),
        ({"gpus_on_node": None}, {"gpus_per_node": 8}),  # SLURM does not tell.
    ],
)
def test_a_step_that_fits_is_let_through(changes, asked):
    assert refusal_of(changes, asked) is None


@pytest.mark.parametrize(
    ("changes", "asked", "found", "flag"),
    [
        ({}, {"nodes": 3}, "nodes=3, but step 100.0.0 runs on 2", "--nodes=3"),
        ({}, {"ranks_per_node": 4}, "4 task(s) on each of 2 node(s), 8 in all", "--ntasks-per-node=4"),
        ({}, {"gpus_per_node": 8}, "granted 2 GPU(s)", "--gpus-per-node=8"),
        ({"world_size": 3}, {"nodes": 2, "ranks_per_node": 2}, "3 in all", "--ntasks=4"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_with_the_flag(changes, asked, found, flag):
    refusal = refusal_of(changes, asked)
    assert refusal is not None
    assert found in refusal.message
    assert flag in refusal.hint
