"""Remove the traces of a running job from an environment; pure, for the login side and the batch step."""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.environments.names import (
    ATTEMPT_VARIABLE,
    CHANNEL_VARIABLE,
    EMULATED_VARIABLE,
    ENVIRONMENT_VARIABLE,
    HEARTBEAT_VARIABLE,
    IMPORTS_VARIABLE,
    LAUNCH_ID_VARIABLE,
    LAUNCHER_VARIABLE,
    MEMORY_VARIABLE,
    PREFLIGHT_VARIABLE,
    RESTART_COUNT_VARIABLE,
    RUN_DIR_VARIABLE,
    SCRIPT_PID_VARIABLE,
    SECRET_VARIABLE,
)

_JOB_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SALLOC_",
    "SRUN_",
    "SQUEUE_",
    "SACCT_",
    "SINFO_",
    "SCANCEL_",
    "PMI",
    "OMPI_",
    "PRTE_",
    "MPI_LOCAL",
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
        ENVIRONMENT_VARIABLE,
        LAUNCHER_VARIABLE,
        LAUNCH_ID_VARIABLE,
        EMULATED_VARIABLE,
        RUN_DIR_VARIABLE,
        ATTEMPT_VARIABLE,
        SCRIPT_PID_VARIABLE,
        IMPORTS_VARIABLE,
        RESTART_COUNT_VARIABLE,
        PREFLIGHT_VARIABLE,
        SECRET_VARIABLE,
        HEARTBEAT_VARIABLE,
        CHANNEL_VARIABLE,
        MEMORY_VARIABLE,
    }
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})
"""Settings of the user, not of a job: the SLURM to talk to, and the token for it."""


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without variables that describe a job, a step or a rank."""
    return {name: value for name, value in environ.items() if not _describes_a_job(name)}


def _describes_a_job(name: str) -> bool:
    if name in _KEPT:
        return False
    return name in _JOB_NAMES or name.startswith(_JOB_PREFIXES)
