"""Start the runs of a sweep: on this machine one after another, on a cluster each as a job of its own."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cli import start_run
from slurmddp.config.script_arguments import as_typed
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED, ConfigError, SlurmddpError, combine_exit_codes
from slurmddp.runs.text_format import counted, print_table

if TYPE_CHECKING:
    from slurmddp.spec import Job


def start(jobs: Sequence[Job], begin: Callable[[Job], int]) -> int:
    """Start each run that is not finished or active; return the exit code.

    Args:
        jobs: the job of each point.
        begin: starts one run, or submits it.

    Raises:
        ConfigError: two points are the same run, or a point can't be started. Nothing is started then.
    """
    from slurmddp.runs import sweeps

    runs_dir = _refuse_alike(jobs)
    for job in {repr((job.resources, job.cluster)): job for job in jobs}.values():
        start_run.script_of(job)
    names = {job.name for job in jobs}
    sweep = sweeps.write(
        runs_dir, names.pop() if len(names) == 1 else "", [(job.run_name, job.overrides) for job in jobs]
    )
    print(f"sweep   {sweep.name}  ({counted(len(jobs), 'run')})")
    codes = _begin_each(jobs, begin)
    print(f"\nsweep   slurmddp list {sweep.name}")
    return combine_exit_codes(codes)


def _begin_each(jobs: Sequence[Job], begin: Callable[[Job], int]) -> list[int]:
    codes: list[int] = []
    for number, job in enumerate(jobs, 1):
        print(f"\npoint   {number} of {len(jobs)}  {shlex.join(_own(jobs, job))}", flush=True)
        try:
            codes.append(begin(job))
        except SlurmddpError:
            left = counted(len(jobs) - number + 1, "point")
            print(f"slurmddp: {left} not started; the same command starts them.", file=sys.stderr)
            raise
        if codes[-1] == EXIT_STOPPED:
            break
    return codes


def show(jobs: Sequence[Job], show_one: Callable[[Job], int]) -> int:
    """Print the points of a sweep and the script or commands of the first; start nothing."""
    _refuse_alike(jobs)
    rows = [(f"# {number}", job.run_name, shlex.join(_own(jobs, job))) for number, job in enumerate(jobs, 1)]
    print_table(("# POINT", "RUN", "SETTINGS"), rows, sys.stdout, whole=True)
    print()
    show_one(jobs[0])
    return EXIT_FINISHED


def _own(jobs: Sequence[Job], job: Job) -> list[str]:
    """Return the settings that not all points have."""
    shared = set.intersection(*(set(one.overrides) for one in jobs)) if len(jobs) > 1 else set()
    return as_typed([word for word in job.overrides if word not in shared])


def _refuse_alike(jobs: Sequence[Job]) -> Path:
    """Raise ConfigError if two points are the same run; return the folder of all runs."""
    seen: dict[str, Job] = {}
    for job in jobs:
        if other := seen.get(job.run_name):
            pair = (other, job)
            one, two = (shlex.join(_own(pair, each) or as_typed(each.overrides)) for each in pair)
            raise ConfigError(
                f"Two points of the sweep are the same run {job.run_name}: {one}, and {two}.",
                hint="Sweep keys whose values mean another run; docs/configuration.md lists them.",
            )
        seen[job.run_name] = job
    folders = {job.run_dir.parent for job in jobs}
    if len(folders) > 1:
        raise ConfigError("The runs of a sweep lie in one folder.", hint="Give one runs_dir=.")
    return folders.pop()
