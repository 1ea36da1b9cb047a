"""Read the rank of a process from mpirun's variables: Open MPI (OMPI_*), Intel MPI and MPICH (PMI_*)."""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.environments.names import LAUNCH_ID_VARIABLE, MASTER_ADDR_VARIABLE, MPIEXEC_VARIABLE
from slurmddp.environments.rank_info import RankInfo, integer, needed
from slurmddp.errors import MismatchError

PMI_VARIABLES = ("PMI_RANK", "PMI_SIZE", "PMI_FD", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Variables that mpiexec of MPICH and of Intel MPI sets for each rank; none of them identifies the launch."""
_LAUNCH_IDS = (
    *(LAUNCH_ID_VARIABLE, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID"),
    MPIEXEC_VARIABLE,
)
"""Variables that together identify a launch of mpirun."""


def started_by_mpirun(environ: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher has started this process, by its variables."""
    return "OMPI_COMM_WORLD_SIZE" in environ or ("PMI_SIZE" in environ and "PMI_RANK" in environ)


def is_on_one_node(environ: Mapping[str, str]) -> bool:
    """Return whether mpiexec of MPICH or of Intel MPI has started all its ranks on this node."""
    return "PMI_SIZE" in environ and environ["PMI_SIZE"] == environ.get("MPI_LOCALNRANKS")


def refuse_inside_step(environ: Mapping[str, str]) -> None:
    """Raise MismatchError if the world sizes of mpirun and of a SLURM step differ.

    mpirun starts its ranks on other nodes by SLURM steps, and its variables also leak into jobs that are
    submitted under it. So each of the two may be the outer launcher. A wrong guess could train N worlds of
    one rank.
    """
    tasks = integer(environ, "SLURM_STEP_NUM_TASKS")
    size = integer(environ, "OMPI_COMM_WORLD_SIZE")
    # srun sets PMI_SIZE as well, for the PMI of its step; only mpiexec sets MPI_LOCALRANKID.
    if size is None and "MPI_LOCALRANKID" in environ:
        size = integer(environ, "PMI_SIZE")
    if tasks is not None and size is not None and tasks != size:
        raise MismatchError(
            f"mpirun has started {size} processes, but the SLURM step has {tasks} tasks.",
            hint="Set SLURMDDP_ENVIRONMENT=mpi if mpirun starts the ranks, or =slurm if srun starts them.",
        )


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return the rank of a process of mpirun, on the assumption that ranks fill one node after the other."""
    rank = needed(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    world_size = needed(environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", least=1)
    local_world_size = needed(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", least=1)
    local_rank = needed(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    if rank >= world_size or local_rank >= local_world_size or local_world_size > world_size:
        raise MismatchError(
            f"mpirun's variables contradict each other: rank {rank} of {world_size}, and {local_rank} of "
            f"{local_world_size} on this node.",
            hint="Unset the OMPI_* and PMI_* variables if mpirun has not started this process.",
        )

    # mpirun sets no variable with the host of rank 0, so with several nodes a person has to set one.
    address = environ.get(MASTER_ADDR_VARIABLE) or environ.get("MASTER_ADDR")
    nodes = -(-world_size // local_world_size)
    if nodes > 1 and not address:
        raise MismatchError(
            f"mpirun started {world_size} ranks on {nodes} nodes, but no variable holds the host of rank 0.",
            hint="Pass the host of rank 0: `mpirun -x SLURMDDP_MASTER_ADDR=HOST ...` (Open MPI), or "
            "`-genv SLURMDDP_MASTER_ADDR HOST` (Intel MPI, MPICH).",
        )

    return RankInfo(
        environment="mpi",
        rank=rank,
        local_rank=local_rank,
        node_rank=rank // local_world_size,
        world_size=world_size,
        local_world_size=local_world_size,
        nodes=nodes,
        hosts=(address or "localhost",),
        master_addr=address,
        launch_id=_launch_id(environ, world_size),
        gpus_on_node=integer(environ, "SLURM_GPUS_ON_NODE"),
    )


def _launch_id(environ: Mapping[str, str], world_size: int) -> str:
    """Return an id that only the ranks of this mpirun share."""
    known = [environ[name] for name in _LAUNCH_IDS if environ.get(name)]
    if not known and world_size > 1:
        raise MismatchError(
            "mpirun sets no variable that identifies this launch, so its ranks can't find each other.",
            hint="Pass an id: `mpirun -x SLURMDDP_LAUNCH_ID=$(uuidgen) ...` (Open MPI), or "
            "`-genv SLURMDDP_LAUNCH_ID $(uuidgen)` (Intel MPI, MPICH).",
        )

    # The id of the job is not enough, because a job may run mpirun several times.
    return ".".join([*known, environ.get("SLURM_JOB_ID", "")]).strip(".") or "mpi"
