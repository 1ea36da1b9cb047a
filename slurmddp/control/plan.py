"""Plan a start: its runs, the batch script and notes; nothing is queued or written."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.errors import RunStateError, SlurmError
from slurmddp.runs.folder import config_secrets
from slurmddp.runs.text_format import counted
from slurmddp.settings.spec import GlobalBatch, Resources

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job

_ID_DIGITS = 12
"""Number of hex digits of each of the two digests in the id of a plan."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that a start would create or resume."""

    name: str
    path: Path
    exists: bool
    """Whether the run folder exists. Such a run is resumed, or left as it is if it is active or finished."""
    settings: str = ""
    """The settings that not all points of a sweep share, on one line."""


@dataclass(frozen=True, kw_only=True)
class StartPlan:
    """The effects of a start that was only planned: its runs, a batch script, and notes."""

    id: str | None = None
    """A digest of the settings and a digest of the code; None if no id was asked for."""
    launcher: str
    """`slurm` or `local`."""
    cluster: str | None
    """Name of the cluster; None for a run on this machine without a cluster file."""
    resources: Resources
    """The nodes, ranks, GPUs, CPUs, memory and time of the first run."""
    runs: tuple[PlannedRun, ...]
    """The runs, in the order of the points."""
    sweep: str | None = None
    """Name of the sweep; None for a single run."""
    script: str
    """The batch script of the first run; for a run on this machine, its shell commands."""
    chosen_lines: tuple[str, ...] = ()
    """The lines of the script that come from settings."""
    arrays: tuple[str, ...] = ()
    """The scripts of the job arrays of a sweep."""
    notes: tuple[str, ...] = ()
    """Remarks as sentences, for example that SLURM would never start the job."""


def plan(jobs: Sequence[Job], sweep: str | None = None, *, with_id: bool = False) -> StartPlan:
    """Return what the start of a job, or of the jobs of a sweep, would do.

    Args:
        jobs: the jobs.
        sweep: name of the sweep; None for a single job.
        with_id: whether the plan gets an id, for which the files of the code are read.

    Raises:
        ConfigError: a job is too large for this machine, or two points of the sweep are the same run.
    """
    first = jobs[0]
    notes: list[str] = []
    arrays: list[str] = []
    settings: dict[str, str] = {}
    if sweep is not None:
        from slurmddp.control.sweep import points_of

        arrays = _arrays(jobs, sweep, notes)
        settings = {name: point.settings for name, point in points_of(jobs).items()}

    runs = [
        PlannedRun(
            name=job.run_name,
            path=job.run_dir,
            exists=job.run_dir.exists(),
            settings=settings.get(job.run_name, ""),
        )
        for job in jobs
    ]
    script, chosen_lines = _script(first, notes)

    return StartPlan(
        id=plan_id(jobs) if with_id else None,
        launcher=first.launcher,
        cluster=first.cluster.name if first.program.config["cluster"] else None,
        resources=first.resources,
        runs=tuple(runs),
        sweep=sweep,
        script=script,
        chosen_lines=tuple(chosen_lines),
        arrays=tuple(arrays),
        notes=tuple(notes),
    )


def for_readers(job: Job) -> Job:
    """Return a job for a plan that others read: its script shows no value that may be a secret.

    Hidden are the values of `cluster.env`, and the texts in `setup`, `sbatch` and `srun` that come from
    environment variables.
    """
    config = job.program.config
    shown = config_secrets.for_readers(config).get("cluster") or {}
    from_environment = (config.get(config_secrets.EXPRESSIONS) or {}).get("cluster") or {}
    hidden = {name: shown[name] for name in ("setup", "sbatch", "srun") if name in from_environment}
    env = dict.fromkeys(job.cluster.env, config_secrets.NOT_SHOWN)

    return replace(
        job,
        cluster=replace(job.cluster, env=env, **hidden),
        overrides=tuple(map(config_secrets.argument_for_readers, job.overrides)),
    )


def plan_id(jobs: Sequence[Job]) -> str:
    """Return the id of a plan: a digest of its jobs and a digest of the files of their code."""
    from slurmddp.control.json_encoding import json_value
    from slurmddp.runs.folder.code_changes import digests

    return f"{_digest([json_value(job) for job in jobs])}-{_digest(digests(jobs[0]))}"


def refuse_changed_plan(planned: str, jobs: Sequence[Job]) -> None:
    """Raise RunStateError unless a plan with the id `planned` is still what a start of the jobs would do."""
    now = plan_id(jobs)
    if planned == now:
        return

    settings, _, code = planned.partition("-")
    now_settings, _, now_code = now.partition("-")
    changed = [
        name
        for name, before, after in (
            ("the settings or configuration files", settings, now_settings),
            ("the code", code, now_code),
        )
        if before != after
    ]
    raise RunStateError(
        f"The plan {planned} is out of date: {' and '.join(changed)} differ from the plan. Nothing was "
        "started.",
        hint="Plan again with the same settings, read the new plan, and submit with its id.",
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]


def _script(job: Job, notes: list[str]) -> tuple[str, Sequence[str]]:
    """Return the batch script of a job, or its shell commands on this machine; add remarks to `notes`.

    Returns:
        The script, and its lines that come from settings.
    """
    if job.launcher == "local":
        from slurmddp.control.admission import refuse_misfit_here

        refuse_misfit_here(job)
        return f"{_local_commands(job)}\n", ()

    from slurmddp.launchers.submit.submitter import build
    from slurmddp.slurm.sbatch_options import note_on_cpus
    from slurmddp.slurm.script import outline

    script = build(job.submitter).script(job)
    remarks = [*_sent_by_submitit(job), *_left_idle(job), note_on_cpus(job), *_limits(job)]
    notes += [remark for remark in remarks if remark]

    return script, list(outline(job))


def _arrays(jobs: Sequence[Job], sweep: str, notes: list[str]) -> list[str]:
    """Return the scripts of the job arrays in which a sweep would be submitted; add remarks to `notes`."""
    from slurmddp.control.sweep import runs_dir_of
    from slurmddp.launchers.submit import array
    from slurmddp.slurm.script import render_array

    runs_dir = runs_dir_of(jobs)
    return [
        render_array(group, array.free_folder(runs_dir, sweep))
        for group in _groups(jobs, notes)
        if len(group) > 1
    ]


def _groups(jobs: Sequence[Job], notes: list[str]) -> list[list[Job]]:
    """Return the jobs of a sweep, split into the job arrays in which they would be submitted.

    If SLURM does not answer, the length of its longest array is unknown, and arrays of any length are
    assumed.
    """
    from slurmddp.control.start import groups
    from slurmddp.launchers.submit import array
    from slurmddp.slurm import client
    from slurmddp.slurm.limits.queries import cluster_name

    if client.on_path() and any(job.launcher == "slurm" for job in jobs):
        try:
            # Raises SlurmError if SLURM does not answer; `groups` would then assume a length limit of 0.
            cluster_name(client.SlurmClient())
            return groups(jobs)
        except SlurmError as error:
            notes.append(f"SLURM may limit arrays to fewer elements: {error.message}")

    return array.groups(jobs, len(jobs))


def _sent_by_submitit(job: Job) -> list[str]:
    if job.submitter != "submitit":
        return []
    return [f"This script runs {job.run_dir}/job.sbatch, which a dry run with submitter=sbatch prints."]


def _left_idle(job: Job) -> list[str]:
    """Return a note if an elastic job that loses a node could not use all its other nodes; else empty."""
    remaining = job.resources.nodes - 1
    if not job.elastic or not remaining:
        return []

    samples = job.program.config["train"]["global_batch"]
    used = GlobalBatch(samples).most_nodes(remaining, job.resources.ranks_per_node)
    if used == remaining:
        return []
    return [
        f"When this job loses a node, it continues on {used} of the other {remaining} nodes, because "
        f"{remaining} nodes can't share the {samples} samples of a step evenly. Choose another "
        "train.global_batch to use them all."
    ]


def _limits(job: Job) -> list[str]:
    """Return a note for each limit of this machine's SLURM that the job exceeds.

    Empty if this machine has no SLURM commands; a note if SLURM does not answer.
    """
    from slurmddp.launchers.submit.fit import fit_of
    from slurmddp.slurm import client
    from slurmddp.slurm.script import render

    if not client.on_path():
        return []

    try:
        fit = fit_of(job, render(job), client.SlurmClient(timeout_s=10))
    except SlurmError as error:
        return [f"The limits of this SLURM were not checked: {error.message} {error.hint}"]

    return [*(f"This SLURM would never start the job: {finding}" for finding in fit.reasons), *fit.notes]


def _local_commands(job: Job) -> str:
    """Return the shell commands of a local run: one agent for each emulated node."""
    from slurmddp.environments.emit import LOCAL_JOB_IDS, emulated_step

    nodes = job.resources.all_nodes
    lines = [
        f"# {job.run_name}: {counted(job.resources.world_size, 'rank')} on this machine, "
        f"{counted(nodes, 'agent')} of {counted(job.resources.ranks_per_node, 'rank')} each",
        f"cd {shlex.quote(str(job.project_dir))}",
    ]
    for node in range(nodes):
        step = {**job.cluster.env, **emulated_step(nodes, node, str(LOCAL_JOB_IDS[0]), job.run_dir, 0)}
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(step.items())]
        command = shlex.join([job.python, "-m", "slurmddp.launchers.agent", str(job.run_dir)])
        lines.append(" \\\n  ".join([*settings, f"{command} &" if node < nodes - 1 else command]))

    return "\n".join(lines)
