"""Detection of the rank under other launchers than srun, inside and outside a SLURM job."""

import pytest

from slurmddp.environments.detect import detect
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


def test_torchrun_inside_a_step_is_the_innermost_launcher():
    info = detect({**FOUR_ON_TWO, **TORCHRUN})
    assert (info.environment, info.rank, info.world_size) == ("torchrun", 5, 8)
    assert (info.local_rank, info.local_world_size, info.node_rank, info.nodes) == (1, 4, 1, 2)
    assert (info.master_addr, info.master_port) == ("n1", 29400)
    assert info.launch_id == "none.1"


def test_variables_set_by_hand_are_enough():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    info = detect(environ)
    assert (info.environment, info.rank, info.local_rank, info.local_world_size) == ("torchrun", 1, 1, 2)
    assert (info.nodes, info.node_rank) == (1, 0)


def test_variables_set_by_hand_must_say_how_many_ranks_a_machine_has_where_there_may_be_several():
    environ = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "29400"}
    for more in ({}, {"LOCAL_RANK": "1"}):
        with pytest.raises(MismatchError, match="LOCAL_WORLD_SIZE"):
            detect({**environ, **more})
    info = detect({**environ, "LOCAL_WORLD_SIZE": "1"})
    assert (info.local_rank, info.node_rank, info.nodes) == (0, 1, 4)
    alone = detect({**environ, "RANK": "0", "WORLD_SIZE": "1"})
    assert (alone.local_rank, alone.nodes) == (0, 1)


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
        (INTEL_MPI, "no id of the launch", "SLURMDDP_LAUNCH_ID"),
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
