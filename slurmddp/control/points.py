"""Plan, check and start jobs from their typed settings, for callers that can't wait for a training.

The caller calls these actions here, or on the login node that the settings name: their arguments are plain.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmddp.control.check import Checked, check
from slurmddp.control.conflicting_configs import refuse_collisions
from slurmddp.control.detached_training import resume_detached, start_detached
from slurmddp.control.events import Report
from slurmddp.control.jobs import jobs_of, own_keys, settings_of_program
from slurmddp.control.plan import StartPlan, for_readers, plan, plan_id, refuse_changed_plan
from slurmddp.control.resume import jobs_to_resume, resume
from slurmddp.control.start import Started, groups, start, warnings_of
from slurmddp.control.sweep import name_of, start_sweep
from slurmddp.errors import ConfigError
from slurmddp.host.working_folder import working_folder

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job

log = logging.getLogger(__name__)


def points_of_settings(
    settings: Sequence[str], program: Sequence[str] = (), *, is_sweep: bool = False
) -> list[list[str]]:
    """Return the settings of each job.

    Args:
        settings: typed settings; in a sweep, they may have several values.
        program: the command line of a program that the ranks run: `[-m] PROGRAM ARGUMENT...`; empty: the
            trainer of slurmddp.
        is_sweep: whether each combination of the values is a job.

    Raises:
        ConfigError: the settings are a search, or a sweep has no values.
    """
    from slurmddp.config.composition import search_space
    from slurmddp.config.composition.sources import DEFAULT
    from slurmddp.config.composition.sweep import points

    if search_space.is_search(settings):
        raise ConfigError(
            "The settings are a search, which waits for the results of its trials. Nothing was started.",
            hint="Type it in a terminal: `slurmddp train -m hydra/sweeper=optuna ...`.",
        )

    whole = [*settings]
    if program:
        whole += settings_of_program(program, own_keys(settings))
    return points(whole, working_folder(), DEFAULT) if is_sweep else [whole]


def plan_points(points: Sequence[Sequence[str]], *, is_sweep: bool) -> StartPlan:
    """Return what the start of jobs would do, with an id for `start_planned`; nothing is queued or written.

    The script shows no value that may be a secret (see `for_readers`).

    Args:
        points: the typed settings of each job.
        is_sweep: whether the jobs are the runs of a sweep.
    """
    notes: list[str] = []
    jobs = jobs_of(points, report=lambda event: notes.extend(warnings_of(event)))
    sweep = name_of(refuse_collisions(jobs)) if is_sweep else None
    planned = plan([for_readers(job) for job in jobs], sweep)

    return replace(planned, id=plan_id(jobs), notes=(*notes, *planned.notes))


def check_points(points: Sequence[Sequence[str]]) -> Checked:
    """Check whether SLURM would start jobs; nothing is queued or written.

    Args:
        points: the typed settings of each job.
    """
    return check(groups(jobs_of(points)))


def _log(event: object) -> None:
    for warning in warnings_of(event):
        log.warning("%s", warning)


def start_planned(
    points: Sequence[Sequence[str]], planned: str, *, is_sweep: bool, report: Report = _log
) -> Started:
    """Start jobs if a plan still holds. A training on this machine runs in a separate process.

    Args:
        points: the typed settings of each job.
        planned: the id of the plan.
        is_sweep: whether the jobs are the runs of a sweep.
        report: called with each event; over ssh, warnings are logged on the host.

    Raises:
        RunStateError: the settings or the code have changed since the plan; nothing was started.
        ConfigError: a setting is wrong, or the jobs are a sweep on this machine.
        SlurmError: SLURM is missing, does not answer, or refused.
    """
    jobs = jobs_of(points, report=report)
    refuse_changed_plan(planned, jobs)
    if is_sweep:
        _refuse_sweep_here(jobs)
        return start_sweep(refuse_collisions(jobs), report=report)

    (job,) = jobs
    if job.launcher == "slurm":
        return start(job, report=report)
    return Started(runs=(start_detached(job, again=False, report=report),))


def resume_and_return(name: str, changes: Sequence[str], *, report: Report = _log) -> Started:
    """Resume a run, or the runs of a sweep. A training on this machine runs in a separate process.

    The arguments and errors are those of `resume`.

    Raises:
        ConfigError: the runs are a sweep on this machine.
    """
    selection, jobs = jobs_to_resume(name, changes, report=lambda event: None)
    if all(job.launcher == "slurm" for job in jobs):
        return resume(name, changes, report=report)

    if selection.sweep is not None:
        _refuse_sweep_here(jobs)
    return Started(runs=(resume_detached(selection.runs[0], changes),))


def _refuse_sweep_here(jobs: Sequence[Job]) -> None:
    """Raise ConfigError if the jobs of a sweep would train on this machine, one after another."""
    if any(job.launcher != "slurm" for job in jobs):
        raise ConfigError(
            "The runs of a sweep on this machine train one after another, until the last has ended. Nothing "
            "was started.",
            hint="Start its points one by one, choose a cluster with +cluster=NAME, or type the command in a "
            "terminal.",
        )
