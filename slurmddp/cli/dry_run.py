"""Print the script or the commands of a job, with notes, for `slurmddp train --dry-run`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slurmddp.errors import EXIT_FINISHED, SlurmError
from slurmddp.runs.text_format import counted, print_table
from slurmddp.settings.spec import GlobalBatch

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job


def show(job: Job) -> int:
    """Print the batch script of a job, or the commands of a local run; submit nothing; return exit code 0."""
    if job.launcher == "local":
        print(_local_commands(job))
        return EXIT_FINISHED

    from slurmddp.launchers.submit.submitter import build
    from slurmddp.slurm.sbatch_options import note_on_cpus
    from slurmddp.slurm.script import outline

    sys.stdout.write(build(job.submitter).script(job))
    sys.stdout.flush()
    print("slurmddp: These lines of the script come from your settings:", file=sys.stderr)
    for line in outline(job):
        print(f"  {line}", file=sys.stderr)

    for note in filter(None, [*_sent_by_submitit(job), *_left_idle(job), note_on_cpus(job), *_limits(job)]):
        print(f"slurmddp: note: {note}", file=sys.stderr)

    return EXIT_FINISHED


def show_many(jobs: Sequence[Job], name: str, show_one: Callable[[Job], int]) -> int:
    """Print the points of a sweep, the scripts of its job arrays, and the script of its first point.

    Args:
        jobs: the jobs of the points.
        name: the name of the sweep.
        show_one: prints the script of a job.

    Returns:
        The exit code 0.
    """
    from slurmddp.control.sweep import points_of, runs_dir_of
    from slurmddp.launchers.submit import array
    from slurmddp.slurm.script import render_array

    runs_dir = runs_dir_of(jobs)
    rows = [(f"# {point.number}", point.run, point.settings) for point in points_of(jobs).values()]
    print_table(("# POINT", "RUN", "SETTINGS"), rows, sys.stdout, whole=True)
    for group in _groups(jobs):
        if len(group) > 1:
            print(f"\n{render_array(group, array.free_folder(runs_dir, name))}", end="")

    print()
    show_one(jobs[0])

    return EXIT_FINISHED


def _groups(jobs: Sequence[Job]) -> list[list[Job]]:
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
            print(
                f"slurmddp: note: SLURM may limit arrays to fewer elements: {error.message}", file=sys.stderr
            )

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
