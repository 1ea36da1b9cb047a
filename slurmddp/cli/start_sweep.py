"""Start the runs of a sweep: on this machine one after another, on a cluster as elements of arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slurmddp.cli import messages, start_run
from slurmddp.config.script_arguments import FREE_ARGUMENTS, key_of, on_one_line
from slurmddp.control.refusals import refuse_collisions, refuse_other_run
from slurmddp.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ConfigError,
    SlurmddpError,
    SlurmError,
    combine_exit_codes,
)
from slurmddp.runs.text_format import counted, print_table
from slurmddp.spec import FUNCTION_CALL

if TYPE_CHECKING:
    from slurmddp.cli.start_array import ArrayStart
    from slurmddp.spec import Job


GIVEN_UP = frozenset({EXIT_STOPPED, EXIT_INTERRUPTED})
"""Exit codes of a local run that a person has ended, and with it the sweep."""


class Begin(Protocol):
    """Starts one run, or submits it; with an `array` it only adds the run to the array."""

    def __call__(self, job: Job, *, array: ArrayStart | None = None) -> int:
        """Return the exit code."""


def start(jobs: Sequence[Job], begin: Begin) -> int:
    """Start each run that is not finished or active; return the exit code.

    Args:
        jobs: the job of each point.
        begin: starts one run, or submits it.

    Raises:
        ConfigError: two points are the same run, or a point can't be started. Nothing is started then.
    """
    from slurmddp.runs import ssh_runs, sweeps

    runs_dir = _refuse_alike(jobs)
    refuse_misfits(jobs)
    name = name_of(jobs)
    names = {job.run_name for job in jobs}
    sweeps.refuse_other(runs_dir, name, lambda run, _: run in names)
    sweeps.write(runs_dir, name, [(job.run_name, job.overrides) for job in jobs])
    print(f"sweep   {name}  ({counted(len(jobs), 'run')})")
    ssh_runs.report_started([job.run_name for job in jobs], name)
    codes = start_points(jobs, begin, name)
    print(f"\n{ending(name)}")
    return combine_exit_codes(codes)


def ending(name: str) -> str:
    """Return the last lines of a sweep or a search: the commands that show it."""
    return f"report  slurmddp report {name}\nsweep   slurmddp list {name}"


def refuse_misfits(jobs: Sequence[Job]) -> None:
    """Raise SlurmddpError if one of the jobs can never start: on this machine, on SLURM, in its folder."""
    for job in jobs:
        refuse_other_run(job)
    for job in {repr((job.resources, job.cluster)): job for job in jobs}.values():
        start_run.script_of(job)


def start_points(
    jobs: Sequence[Job], begin: Begin, sweep: str, lines: Mapping[str, str] | None = None
) -> list[int]:
    """Start points of a sweep, on SLURM those of the same resources as one array; return their exit codes.

    On this machine a stop or Ctrl-C leaves out the points after it.

    Args:
        jobs: the job of each point.
        begin: starts one run, or submits it.
        sweep: the name of the sweep.
        lines: what is printed before the start of each run, by its name; None: its number and settings.
    """
    if lines is None:
        lines = {
            job.run_name: f"point   {number} of {len(jobs)}  {job.run_name}  {own}"
            for number, job, own in numbered(jobs)
        }
    codes: list[int] = []
    for group in groups(jobs):
        begun = len(codes)
        try:
            codes += _begin_group(group, begin, sweep, lines)
        except SlurmddpError:
            left = counted(len(jobs) - begun, "point")
            print(f"slurmddp: {left} not started; the same command starts them.", file=sys.stderr)
            raise
        if not GIVEN_UP.isdisjoint(codes):
            break
    return codes


def name_of(jobs: Sequence[Job]) -> str:
    """Return the name of the sweep of these jobs."""
    from slurmddp.runs import sweeps

    return sweeps.name_of(common_name(jobs), [job.run_name for job in jobs])


def common_name(jobs: Sequence[Job]) -> str:
    """Return the name that all jobs have; empty if they differ."""
    names = {job.name for job in jobs}
    return names.pop() if len(names) == 1 else ""


def groups(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the points of each array; a point that no array takes is alone."""
    from slurmddp.cli.start_array import most_at_once
    from slurmddp.launchers.submit import array
    from slurmddp.slurm import client

    if len(jobs) == 1 or all(job.launcher != "slurm" for job in jobs):
        return [[job] for job in jobs]
    return array.groups(jobs, most_at_once(client.SlurmClient()) if client.on_path() else len(jobs))


def _groups_to_show(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the points of each array; if SLURM does not say how long an array may be, arrays are whole."""
    from slurmddp.launchers.submit import array
    from slurmddp.slurm import client

    if client.on_path() and any(job.launcher == "slurm" for job in jobs):
        try:
            client.SlurmClient().cluster_name()  # Where it has no answer, the size of an array would be 0.
            return groups(jobs)
        except SlurmError as error:
            print(
                f"slurmddp: note: The arrays of this SLURM may be shorter: {error.message}", file=sys.stderr
            )
    return array.groups(jobs, len(jobs))


def _begin_group(group: Sequence[Job], begin: Begin, sweep: str, lines: Mapping[str, str]) -> list[int]:
    """Start the points of a group, several as one array; return the exit code of each."""
    from slurmddp.cli.start_array import ArrayStart

    if len(group) == 1:
        (job,) = group
        print(f"\n{lines[job.run_name]}", flush=True)
        try:
            return [begin(job)]
        except SlurmddpError as error:
            if job.launcher == "slurm":
                raise
            return [messages.report(error)]  # A failed training does not end the sweep.
    with ArrayStart(sweep) as array:
        for job in group:
            print(lines[job.run_name], flush=True)
        # Two sweeps never wait for each other's locks.
        codes = [begin(job, array=array) for job in sorted(group, key=lambda job: job.run_name)]
        array.submit([job.run_name for job in group])
        return codes


def show(jobs: Sequence[Job], name: str, show_one: Callable[[Job], int]) -> int:
    """Print the points of a sweep, its arrays, and the script of the first point; start nothing."""
    from slurmddp.launchers.submit import array
    from slurmddp.slurm.script import render_array

    runs_dir = _refuse_alike(jobs)
    rows = [(f"# {number}", job.run_name, own) for number, job, own in numbered(jobs)]
    print_table(("# POINT", "RUN", "SETTINGS"), rows, sys.stdout, whole=True)
    for group in _groups_to_show(jobs):
        if len(group) > 1:
            print(f"\n{render_array(group, array.free_folder(runs_dir, name))}", end="")
    print()
    show_one(jobs[0])
    return EXIT_FINISHED


def numbered(jobs: Sequence[Job]) -> list[tuple[int, Job, str]]:
    """Return the number of each point, its job, and its settings without the settings of all points."""
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()

    def own(job: Job) -> list[str]:
        # The program of a function says how to read its arguments.
        return [
            word
            for word in job.overrides
            if (word not in shared or FUNCTION_CALL in word) and key_of(word) != FREE_ARGUMENTS
        ]

    return [(number, job, on_one_line(own(job))) for number, job in enumerate(jobs, 1)]


def _refuse_alike(jobs: Sequence[Job]) -> Path:
    """Raise ConfigError if two points are the same run; return the folder of all runs."""
    refuse_collisions(jobs)
    seen: dict[str, Job] = {}
    for job in jobs:
        if other := seen.get(job.run_name):
            pair = numbered((other, job))
            one, two = (own or on_one_line(each.overrides) for _, each, own in pair)
            raise ConfigError(
                f"Two points of the sweep are the same run {job.run_name}: {one}, and {two}.",
                hint="Sweep keys whose values mean another run; docs/configuration.md lists them.",
            )
        seen[job.run_name] = job
    folders = {job.run_dir.parent for job in jobs}
    if len(folders) > 1:
        raise ConfigError("The runs of a sweep lie in one folder.", hint="Give one runs_dir=.")
    return folders.pop()
