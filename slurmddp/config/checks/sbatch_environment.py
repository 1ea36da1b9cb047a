"""Read sbatch options from environment variables such as `SBATCH_ACCOUNT`.

sbatch prefers these variables to the header of a script. slurmddp uses them only for options that the
configuration leaves open, and writes the result into the header. So a dry run shows the options, and a
requeued or resumed job keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.slurm.units import parse_minutes

CLUSTER_KEYS = {
    "SBATCH_PARTITION": "partition",
    "SBATCH_ACCOUNT": "account",
    "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time_limit",
}
"""sbatch's variables for options that have a key in the configuration, with this key."""
OPTIONS = {
    "SBATCH_ACCTG_FREQ": "acctg-freq",
    "SBATCH_CORE_SPEC": "core-spec",
    "SBATCH_DELAY_BOOT": "delay-boot",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_GPU_FREQ": "gpu-freq",
    "SBATCH_GRES_FLAGS": "gres-flags",
    "SBATCH_HINT": "hint",
    "SBATCH_NETWORK": "network",
    "SBATCH_POWER": "power",
    "SBATCH_PROFILE": "profile",
    "SBATCH_REQ_SWITCH": "switches",
    "SBATCH_THREAD_SPEC": "thread-spec",
    "SBATCH_THREADS_PER_CORE": "threads-per-core",
    "SBATCH_WAIT_ALL_NODES": "wait-all-nodes",
    "SBATCH_WCKEY": "wckey",
}
"""sbatch's variables for other options, whose values are added under `sbatch:` of the cluster."""
SRUN_OPTIONS = {
    "SLURM_ACCTG_FREQ": "acctg-freq",
    "SLURM_CPU_BIND": "cpu-bind",
    "SLURM_CPU_FREQ_REQ": "cpu-freq",
    "SLURM_DISTRIBUTION": "distribution",
    "SLURM_GPU_BIND": "gpu-bind",
    "SLURM_HINT": "hint",
    "SLURM_MEM_BIND": "mem-bind",
    "SLURM_NETWORK": "network",
    "SLURM_PROFILE": "profile",
    "SLURM_THREADS_PER_CORE": "threads-per-core",
}
"""Variables that srun reads, with their options. A job does not inherit them from the shell that submits it.
"""


def fill(config: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration with missing values filled in from the SBATCH_* variables of `environ`.

    The configuration is returned unchanged for a local run, and inside a job.
    """
    if not _applies(config, environ):
        return dict(config)

    cluster = config["cluster"]
    keys = {
        key: environ[name]
        for name, key in CLUSTER_KEYS.items()
        if environ.get(name) and cluster[key] is None and config.get(key) is None
    }
    if "time_limit" in keys:
        _check_time(keys["time_limit"])

    given = {_option(name) for name in cluster["sbatch"]}
    options = {
        # sbatch reads a variable that is set but empty as an option without a value, such as --exclusive.
        option: environ[name] or True
        for name, option in OPTIONS.items()
        if name in environ and option not in given
    }
    return {**config, "cluster": {**cluster, **keys, "sbatch": {**options, **cluster["sbatch"]}}}


def _check_time(limit: str) -> None:
    """Raise ConfigError if the value of SBATCH_TIMELIMIT is not a time limit of SLURM."""
    try:
        parse_minutes(limit)
    except ConfigError as error:
        raise ConfigError(
            f"SBATCH_TIMELIMIT is {limit!r}, which is not a time.",
            hint="Unset the variable, or use time_limit=HH:MM:SS.",
        ) from error


def unused(config: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Return a note for each environment variable of sbatch or srun that has no effect on the job.

    Args:
        config: the configuration that `fill` returned.
        environ: the environment of the command.
    """
    if not _applies(config, environ):
        return []

    cluster = config["cluster"]
    options = {_option(name): value for name, value in cluster["sbatch"].items()}
    notes = []
    for name in sorted(name for name in environ if name.startswith("SBATCH_")):
        if name in OPTIONS:
            key = OPTIONS[name]
            chosen = options.get(key)
        elif name in CLUSTER_KEYS:
            key = CLUSTER_KEYS[name]
            chosen = config.get(key) or cluster.get(key)
        else:
            notes.append(
                f"{name} is ignored: slurmddp sets that option itself, or the option is not for a job."
            )
            continue

        value = environ[name]
        if value and str(chosen) != value:
            notes.append(f"{name}={value} is ignored: the configuration has {key}={chosen}.")

    return [*notes, *_unused_by_srun(cluster["srun"], environ)]


def _unused_by_srun(srun: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Return a note for each variable of srun whose value is missing under `srun:` of the cluster."""
    given = {_option(name): str(value) for name, value in srun.items()}
    return [
        f"{name}={environ[name]} is ignored: a job does not get this variable. For the job's srun use "
        f"+cluster.srun.{option}={environ[name]}."
        for name, option in sorted(SRUN_OPTIONS.items())
        if environ.get(name) and given.get(option) != environ[name]
    ]


def _applies(config: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Return whether the variables of sbatch are meant for the new job.

    Inside a job, they may come from that job, so they are not used.
    """
    return config["cluster"] is not None and config["launcher"] != "local" and "SLURM_JOB_ID" not in environ


def _option(name: str) -> str:
    """Return the name of an option as sbatch spells it, without `--`: `mail-type` for `--mail_type`."""
    return name.removeprefix("--").replace("_", "-")
