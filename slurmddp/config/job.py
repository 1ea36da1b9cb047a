"""Build a `Job` from a checked configuration: its size, launcher and name."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmddp.config.checks import paths
from slurmddp.config.checks.training import check_training
from slurmddp.config.resources import check_global_batch, hold_global_batch, resolve
from slurmddp.config.same_run import run_dir_of
from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.arguments import quoted
from slurmddp.settings.check_values import check_folder
from slurmddp.settings.schema import Cluster, PolicySettings
from slurmddp.settings.spec import BACKENDS, Job, Program


def build_job(
    config: Mapping[str, Any],
    *,
    project_dir: Path,
    overrides: Sequence[str] = (),
    gpus_here: int = 0,
    folder: RunFolder | None = None,
) -> Job:
    """Return the job of a composed configuration.

    Args:
        config: the checked configuration.
        project_dir: the project folder, in which the command runs.
        overrides: the settings of the command line as typed.
        gpus_here: the number of GPUs of this machine, for a job without a cluster.
        folder: the run folder, if the job resumes an existing run. Otherwise the configuration decides it.

    Raises:
        ConfigError: the size of the job is impossible, two keys of the trainer contradict each other, or the
            job would wait forever for a run of the key `after`.
        RunNotFoundError: a run of the key `after` does not exist.
    """
    project_dir = project_dir.absolute()
    cluster = _cluster(config)
    launcher = _launcher(config, cluster)
    check_training(config)
    _check_backend(config["backend"])
    resources = resolve(config, cluster, launcher, gpus_here)
    check_global_batch(config, resources)

    final = {
        **config,
        "nodes": resources.nodes,
        # The key `gpus` is no longer needed: `nodes` times `gpus_per_node` is now the same number of GPUs.
        "gpus": None,
        "gpus_per_node": resources.gpus_per_node,
        "ranks_per_node": resources.ranks_per_node,
        "launcher": launcher,
        "project_dir": str(project_dir),
    }
    runs_dir = _runs_dir(config["runs_dir"], project_dir)
    run_dir = folder.path if folder else run_dir_of(runs_dir, config["name"], final)
    if config["elastic"]:
        final = hold_global_batch(final, resources)
    paths.check_folder(run_dir)

    python = cluster.python if cluster and launcher == "slurm" else None
    on_event = _on_event(config["policy"].get("on_event", ()))
    return Job(
        name=config["name"],
        run_name=run_dir.name,
        run_dir=run_dir,
        project_dir=project_dir,
        launcher=launcher,
        submitter=config["submitter"],
        python=python or sys.executable,
        cluster=cluster or Cluster(name="local"),
        resources=resources,
        policy=PolicySettings(**{**config["policy"], "on_event": on_event}),
        program=Program(target=config["program"]["_target_"], config=final),
        overrides=tuple(overrides),
        snapshot=config["snapshot"],
        elastic=config["elastic"],
        after=_jobs_to_wait_for(config["after"], launcher),
        array_parallelism=config["array_parallelism"],
    )


def _jobs_to_wait_for(runs: Sequence[str], launcher: str) -> tuple[str, ...]:
    """Return the ids of the SLURM jobs that must finish before this job starts."""
    if not runs:
        return ()
    # Imported here: few jobs wait for other jobs, and `after` needs modules that take 25 ms to import.
    from slurmddp.config import after

    return after.jobs_of(runs, launcher)


def _runs_dir(path: str, project_dir: Path) -> Path:
    """Return the absolute path of the folder `runs_dir`, which may be given relative to the project."""
    check_folder("runs_dir", path)
    return Path(os.path.normpath(project_dir / path))


def _on_event(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command of `policy.on_event`.

    Raises:
        ConfigError: the command is a shell line in one text, not a list of words.
    """
    if len(command) == 1 and " " in command[0] and not Path(command[0]).exists():
        raise ConfigError(
            f"policy.on_event is the single text {command[0]!r}, but no program has this name.",
            hint="Write the command as a list of words, or as a line for a shell: "
            f"policy.on_event='[sh, -c, {quoted(command[0])}]'",
        )
    return tuple(command)


def _cluster(config: Mapping[str, Any]) -> Cluster | None:
    """Return the chosen cluster, in which the run's partition, account and qos replace the cluster's.

    None if no cluster is chosen.
    """
    if config["cluster"] is None:
        return None

    fields = {**config["cluster"], "setup": tuple(config["cluster"]["setup"])}
    for key in ("partition", "account", "qos"):
        if config[key] is not None:
            fields[key] = config[key]
    return Cluster(**fields)


def _check_backend(backend: str) -> None:
    """Raise ConfigError for an unknown name in the key `backend`; `paths.check_targets` checks classes."""
    # The key is one name, or one name for each type of device: cpu:gloo,cuda:nccl.
    for part in backend.split(","):
        name = part.rpartition(":")[2].strip()
        if "." not in name and name.lower() not in BACKENDS:
            raise ConfigError(
                f"`backend` can't be {name!r}.",
                hint=f"{near_matches(name, BACKENDS)} A class of your own is given as package.module.Class.",
            )


def _launcher(config: Mapping[str, Any], cluster: Cluster | None) -> str:
    """Return `slurm` or `local`, where `auto` means `slurm` if a cluster is chosen."""
    launcher = str(config["launcher"])
    if launcher == "slurm" and cluster is None:
        raise ConfigError("launcher=slurm needs a cluster, but none is chosen.", hint="Use +cluster=NAME.")
    if launcher == "auto":
        return "local" if cluster is None else "slurm"
    return launcher
