"""Resume ended runs from their last checkpoints, or train finished runs further."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmddp.config.checks.nccl_variables import misspelled
from slurmddp.config.checks.sbatch_environment import unused
from slurmddp.config.resources import SIZE
from slurmddp.config.resume_changes import job_of_run
from slurmddp.control.admission import refuse_misfits
from slurmddp.control.events import Info, Note, Report, ignore
from slurmddp.control.hold import hold, keep
from slurmddp.control.run_states import refuse_active, refuse_finished, refuse_unclear
from slurmddp.control.selection import Selection, select_own
from slurmddp.control.start import Started, StartedRun, leave_active, start_claimed
from slurmddp.control.submission import ClaimedRun
from slurmddp.control.sweep import SweepBegins, points_of, reported_sweep
from slurmddp.errors import RunStateError
from slurmddp.runs.folder.history import is_unanswered
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status import run_status
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.runs.sweeps import Sweep
from slurmddp.runs.text_format import counted
from slurmddp.settings.arguments import key_of
from slurmddp.slurm.client import SlurmClient

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job


@dataclass(frozen=True)
class SizeChanges:
    """A run resumes on another number of ranks, with the same number of samples in each optimizer step."""

    run: str
    ranks: int
    samples: int
    """Number of samples of an optimizer step, summed over all ranks."""


def resume(name: str, changes: Sequence[str] = (), *, report: Report = ignore) -> Started:
    """Resume a run, or the runs of a sweep, from their last checkpoints.

    Args:
        name: name of a run or a sweep, the beginning of a name, or a run folder.
        changes: typed settings with new values. They may change where, for how long and on how many nodes a
            run trains, and the length of its training.
        report: called with each event.

    Returns:
        The outcome for each run. Of a sweep, runs that are active, finished or still ending do not start.

    Raises:
        RunNotFoundError: the name matches no run or sweep, or several.
        ConfigError: a change is wrong, another account owns a run, or files of a run can't be read.
        RunStateError: the run has finished and the changes don't extend it, or it is active and can't change.
        SlurmError: SLURM is missing, does not answer, or refused.
        RankFailure: the training on this machine has failed.

    Example:
        resume("gpt", ["time_limit=24:00:00"])
    """
    selection = select_own(name)
    if selection.sweep is None:
        return Started(runs=(_resume_one(selection.runs[0], changes, report),))
    return _resume_sweep(selection.sweep, changes, report)


def jobs_to_resume(
    name: str, changes: Sequence[str] = (), *, report: Report = ignore
) -> tuple[Selection, list[Job]]:
    """Return the runs that a name selects, and the jobs that `resume` would start for them.

    Of a sweep, runs that are active, finished or still ending have no job in the list. The arguments are the
    arguments of `resume`.
    """
    selection = select_own(name)
    if selection.sweep is None:
        return selection, [job_of_run(selection.runs[0], changes)]

    jobs, _ = _resumable(selection.runs, changes, report)
    return selection, jobs


def _resumable(
    runs: Sequence[RunFolder], changes: Sequence[str], report: Report
) -> tuple[list[Job], list[StartedRun]]:
    """Return the jobs of the runs of a sweep that can be resumed, and the outcomes for its other runs."""
    jobs: list[Job] = []
    outcomes: list[StartedRun] = []
    for status in statuses(runs, SlurmClient()):
        outcome = _outcome_without_start(status, changes, report)
        if outcome is not None:
            outcomes.append(outcome)
        else:
            jobs.append(job_of_run(RunFolder(status.path), changes))

    return jobs, outcomes


def _resume_one(folder: RunFolder, changes: Sequence[str], report: Report) -> StartedRun:
    """Resume one run, and return the outcome; an active run is left as it is."""
    with hold(folder, report) as lock:
        status = run_status.status(folder, SlurmClient())
        if _is_active(status, changes):
            return leave_active(status, report)

        # The settings are read only now, under the lock: no other command can change them before the start.
        job = job_of_run(folder, changes)
        _report_effects([job], changes, report)
        claimed = ClaimedRun(job, keep(lock, job.run_name), is_new=False)

    (outcome,) = start_claimed([job], lambda *_: claimed, report=report)
    return outcome


def _resume_sweep(sweep: Sweep, changes: Sequence[str], report: Report) -> Started:
    """Resume the runs of a sweep that can be resumed, and return the outcomes for all of its runs."""
    jobs, other_outcomes = _resumable(sweep.started, changes, report)
    refuse_misfits(jobs, report)
    report(SweepBegins(sweep=sweep.name, runs=len(sweep.runs), to_resume=len(jobs)))
    missing = len(sweep.runs) - len(sweep.started)
    if missing:
        points = counted(missing, "point")
        report(Note(f"The sweep has {points} without a run folder; the sweep's command starts them."))

    _report_effects(jobs, changes, report)

    def claim(job: Job, _: object) -> ClaimedRun | StartedRun:
        folder = RunFolder(job.run_dir)
        with hold(folder, report) as lock:
            status = run_status.status(folder, SlurmClient())
            outcome = _outcome_without_start(status, changes, report)
            return outcome or ClaimedRun(job, keep(lock, job.run_name), is_new=False)

    outcomes = start_claimed(jobs, claim, sweep=sweep.name, points=points_of(jobs), report=report)
    order = [folder.name for folder in sweep.runs]

    return reported_sweep(sweep.name, [*other_outcomes, *outcomes], order, report)


def _outcome_without_start(status: RunStatus, changes: Sequence[str], report: Report) -> StartedRun | None:
    """Return the outcome for a run of a sweep that does not start; None for a run that can be resumed.

    Why the run does not start is reported as an `Info` (active) or a `Note` (finished or still ending).
    """
    try:
        if not _is_active(status, changes):
            return None
        report(Info(f"{status.name} is {status.state} already: {status.detail}."))
        return StartedRun(name=status.name, path=status.path, outcome="active", job_id=status.job_id)
    except RunStateError as error:
        report(Note(error.message))
        return StartedRun(name=status.name, path=status.path, outcome="refused", reason=error.message)


def _is_active(status: RunStatus, changes: Sequence[str]) -> bool:
    """Return whether a run is active and needs no start; False if it can be resumed.

    Raises:
        RunStateError: the run has finished and the changes don't extend it, it is still ending, or it is
            active and there are changes.
        ConfigError: a record of the run can't be read.
        SlurmError: SLURM does not answer.
    """
    # sbatch did not answer the last submission, so SLURM may have its job. The run counts as resumable,
    # because `Submission.submit` looks for this job before it submits another one.
    if is_unanswered(RunFolder(status.path)):
        return False
    if status.active and not changes:
        refuse_unclear(status)
        return True

    refuse_active(
        status,
        unchanged="The changes were not applied.",
        hint=f"Run `slurmddp stop {status.name}` first, then resume it with the changes.",
    )
    refuse_finished(status, changes)

    return False


def _report_effects(jobs: Sequence[Job], changes: Sequence[str], report: Report) -> None:
    """Report a `Note` for each setting without effect, and the new size of each job.

    The sizes are reported, as `SizeChanges`, only if the changes contain a key of `SIZE`.
    """
    notes: dict[str, None] = {}
    for job in jobs:
        config = job.program.config
        notes.update(dict.fromkeys([*unused(config, os.environ), *misspelled(config, os.environ)]))

    for note in notes:
        report(Note(note))

    if any(key_of(change) in SIZE for change in changes):
        for job in jobs:
            samples = job.program.config["train"]["global_batch"]
            report(SizeChanges(job.run_name, job.resources.world_size, samples))
