"""Remove the variables of a running job from an environment; pure, for the login side and the batch step.

A job that is submitted from inside another job would otherwise take the variables of that job for its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.environments import names

_JOB_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    # Default options of SLURM's commands; sbatch prefers SBATCH_* to the header of a script.
    "SBATCH_",
    "SALLOC_",
    "SRUN_",
    "SQUEUE_",
    "SACCT_",
    "SINFO_",
    "SCANCEL_",
    # mpirun sets these for a rank; a new process that inherits them would take itself for this rank.
    "PMI",
    "OMPI_",
    "PRTE_",
    "MPI_LOCAL",
    # torchrun sets these for a launch; new ranks that inherit them would connect to its store.
    "TORCHELASTIC_",
    "MASTER_",
)
_JOB_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        names.ENVIRONMENT_VARIABLE,
        names.LAUNCHER_VARIABLE,
        names.LAUNCH_ID_VARIABLE,
        names.EMULATED_VARIABLE,
        names.DETACHED_VARIABLE,
        names.CONTROLLER_VARIABLE,
        names.RUN_DIR_VARIABLE,
        names.ATTEMPT_VARIABLE,
        names.SCRIPT_PID_VARIABLE,
        names.IMPORTS_VARIABLE,
        names.RESTART_COUNT_VARIABLE,
        names.PREFLIGHT_VARIABLE,
        # The secret belongs to one attempt, and the descriptors are open only in its processes.
        names.SECRET_VARIABLE,
        names.HEARTBEAT_VARIABLE,
        names.CHANNEL_VARIABLE,
        names.MEMORY_VARIABLE,
    }
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})
"""Settings of the user, not of a job: the SLURM to use, and the token for it."""


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that describe a job, a step or a rank."""
    return {name: value for name, value in environ.items() if not _describes_a_job(name)}


def _describes_a_job(name: str) -> bool:
    if name in _KEPT:
        return False
    return name in _JOB_NAMES or name.startswith(_JOB_PREFIXES)
