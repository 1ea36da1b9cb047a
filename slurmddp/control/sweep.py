"""Start the runs of a sweep: on SLURM as elements of arrays, on this machine one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.control.admission import refuse_misfits
from slurmddp.control.conflicting_configs import refuse_collisions
from slurmddp.control.events import Report, ignore
from slurmddp.control.start import PointBegins, Started, StartedRun, StartHere, claim_for_start, start_claimed
from slurmddp.errors import ConfigError, SlurmddpError, SlurmError
from slurmddp.runs import ssh_runs, sweeps
from slurmddp.runs.text_format import counted
from slurmddp.settings.arguments import FREE_ARGUMENTS, key_of, on_one_line
from slurmddp.settings.spec import FUNCTION_CALL

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job


@dataclass(frozen=True, kw_only=True)
class SweepBegins:
    """The runs of a sweep or a search are about to start."""

    sweep: str
    """Name of the sweep."""
    runs: int
    """Number of the sweep's runs, or of a search's trials."""
    to_resume: int | None = None
    """Number of runs to resume; None for a new start of the sweep."""
    is_search: bool = False


def start_sweep(
    jobs: Sequence[Job],
    *,
    again: bool = False,
    start_here: StartHere | None = None,
    report: Report = ignore,
) -> Started:
    """Start each run of a sweep that is neither finished nor active.

    Args:
        jobs: the job of each point.
        again: whether to rename the folders of earlier runs first, so that all runs start anew.
        start_here: starts a job on this machine; None: the run is trained to its end.
        report: called with each event.

    Returns:
        The outcomes in the order of the points, and the name of the sweep.

    Raises:
        ConfigError: two points are the same run, or a point can't be started. Nothing is started then.
        SlurmError: SLURM is missing, does not answer, or refused the first array. If SLURM refuses a later
            array, the runs of this array and of later ones have the outcome "refused".
    """
    runs_dir = runs_dir_of(jobs)
    refuse_misfits(jobs, report)
    name = name_of(jobs)
    order = dict.fromkeys(job.run_name for job in jobs)
    sweeps.refuse_other(runs_dir, name, lambda run, _: run in order)
    sweeps.write(runs_dir, name, [(job.run_name, job.overrides) for job in jobs])

    report(SweepBegins(sweep=name, runs=len(jobs)))
    ssh_runs.report_started([*order], name)
    outcomes = start_claimed(
        jobs,
        claim_for_start(again=again, report=report),
        sweep=name,
        points=points_of(jobs),
        start_here=start_here,
        report=report,
    )

    return reported_sweep(name, outcomes, [*order], report)


def reported_sweep(
    name: str, outcomes: Sequence[StartedRun], order: Sequence[str], report: Report
) -> Started:
    """Sort the outcomes of a sweep's runs by the points of the sweep; report and return the result.

    Args:
        name: name of the sweep.
        outcomes: the outcomes of its runs.
        order: the names of its runs in the order of its points.
        report: called with the returned `Started`.
    """
    places = {run: place for place, run in enumerate(order)}
    started = Started(runs=tuple(sorted(outcomes, key=lambda run: places[run.name])), sweep=name)
    report(started)
    return started


def raise_if_incomplete(started: Started) -> None:
    """Raise an error for the first run of a sweep that failed or was refused, if there is one.

    For `map_array`, which returns runs instead of outcomes.

    Raises:
        SlurmError: SLURM refused a job.
        SlurmddpError: a run on this machine failed.
    """
    refused = [run for run in started.runs if run.outcome == "refused" and run.exit_code]
    failed = refused or [run for run in started.runs if run.outcome == "failed"]
    if failed:
        kind = SlurmError if refused else SlurmddpError
        raise kind(
            f"{failed[0].name} {'was not started' if refused else 'failed'}: {failed[0].reason}",
            hint=f"{len(failed)} of {counted(len(started.runs), 'call')} failed. To start them, call "
            "map_array with the same arguments again.",
        )


def name_of(jobs: Sequence[Job]) -> str:
    """Return the name of the sweep of these jobs, made from their common `name=` and their run names."""
    return sweeps.name_of(common_name(jobs), [job.run_name for job in jobs])


def common_name(jobs: Sequence[Job]) -> str:
    """Return the `name=` that all jobs have; empty if their names differ."""
    names = {job.name for job in jobs}
    return names.pop() if len(names) == 1 else ""


def points_of(jobs: Sequence[Job]) -> Mapping[str, PointBegins]:
    """Return the event to report before the start of each point, by the name of its run.

    The event shows the settings that not all points share.
    """
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()

    points = {}
    for number, job in enumerate(jobs, 1):
        # A setting that contains a function call is shown even if all points share it, because the arguments
        # of the function can be read only beside the function's name.
        settings = [word for word in job.overrides if word not in shared or FUNCTION_CALL in word]
        settings = [word for word in settings if key_of(word) != FREE_ARGUMENTS]
        points[job.run_name] = PointBegins(
            run=job.run_name, number=number, total=len(jobs), settings=on_one_line(settings)
        )

    return points


def runs_dir_of(jobs: Sequence[Job]) -> Path:
    """Return the folder that holds the run folders of a sweep.

    Raises:
        ConfigError: two points are the same run or have the same run name, or the runs have several folders.
    """
    refuse_collisions(jobs)
    jobs_by_name: dict[str, Job] = {}
    for job in jobs:
        other = jobs_by_name.setdefault(job.run_name, job)
        if other is not job:
            raise ConfigError(
                f"Two points of the sweep are the same run {job.run_name}: {_pair(other, job)}.",
                hint="Sweep only keys whose values distinguish runs; docs/reference/configuration.md lists "
                "these keys.",
            )

    folders = {job.run_dir.parent for job in jobs}
    if len(folders) > 1:
        raise ConfigError(
            "The runs of a sweep must be in one folder, but their runs_dir= differ.",
            hint="Set the same runs_dir= for all points.",
        )
    return folders.pop()


def _pair(first: Job, second: Job) -> str:
    """Return a phrase with the typed settings that distinguish two jobs; with all settings if none do."""
    texts = []
    for job, other in ((first, second), (second, first)):
        typed = [word for word in job.overrides if key_of(word) != FREE_ARGUMENTS]
        different = [word for word in typed if word not in other.overrides]
        texts.append(on_one_line(different or typed))

    return ", and ".join(texts)
