"""Start jobs: on SLURM, jobs with equal requests as one array; on this machine, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slurmddp.control.admission import checked_script
from slurmddp.control.conflicting_configs import refuse_extended, refuse_other_run
from slurmddp.control.events import Info, Note, Report, Waiting, ignore
from slurmddp.control.hold import hold
from slurmddp.control.local_training import train_here
from slurmddp.control.run_states import refuse_active, refuse_unclear
from slurmddp.control.status import status_of
from slurmddp.control.submission import (
    ClaimedRun,
    EarlierRunRenamed,
    Submission,
    SubmittedJob,
    put_back,
    report_renamed,
)
from slurmddp.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    SlurmddpError,
    combine_exit_codes,
)
from slurmddp.launchers.submit import array, queued_jobs
from slurmddp.runs.folder.code_changes import changed_since
from slurmddp.runs.folder.create import create, free_name
from slurmddp.runs.folder.history import is_unanswered
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import refuse_foreign
from slurmddp.runs.ssh_runs import report_started
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.slurm import client

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job

ENDED_BY_PERSON = frozenset({EXIT_STOPPED, EXIT_INTERRUPTED})
"""Exit codes of a training on this machine that a person ended; the runs after it are not started."""


@dataclass(frozen=True, kw_only=True)
class StartedRun:
    """The outcome of a start or a resume for one run."""

    name: str
    path: Path
    outcome: Literal["submitted", "training", "trained", "active", "finished", "failed", "refused"]
    """submitted: SLURM has queued its job. training: it trains on this machine, in a separate process.
    trained: it has trained on this machine, and ended with `exit_code`. active: it already had a job or a
    process. finished: it had already finished. failed: its training on this machine failed. refused: its
    state allows no start, or SLURM refused its job after it had queued other jobs of the sweep."""
    job_id: str | None = None
    exit_code: int = EXIT_FINISHED
    reason: str = ""
    """The reason why the run failed or was refused."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """The outcome of a start or a resume for each of its runs."""

    runs: tuple[StartedRun, ...]
    """The runs, in the order of the points. If a person ends a run, the points after it are missing."""
    sweep: str | None = None
    """Name of the sweep; None for a single run."""

    @property
    def exit_code(self) -> int:
        """The exit code for all runs together; if a start was refused, the exit code of the refusal."""
        codes = [run.exit_code for run in self.runs]
        refused = [run.exit_code for run in self.runs if run.outcome == "refused"]
        if any(refused):
            return max(refused)
        if self.sweep is None and codes:
            return codes[0]
        return combine_exit_codes(codes)


@dataclass(frozen=True, kw_only=True)
class PointBegins:
    """A point of a sweep or a search is about to start."""

    run: str
    number: int
    """Number of the point, from 1."""
    total: int
    """Number of all points."""
    settings: str
    """The settings that not all points share, on one line."""
    is_trial: bool = False
    """Whether a search chose the settings."""
    in_array: bool = False
    """Whether the point becomes an element of an array."""


@dataclass(frozen=True)
class PointFailed:
    """The training of a point on this machine has failed. The points after it still start."""

    run: str
    error: SlurmddpError


@dataclass(frozen=True)
class PointsLeft:
    """`count` points of a sweep were not started, because SLURM refused one of them."""

    count: int
    error: SlurmddpError | None = None
    """SLURM's refusal, if SLURM has queued earlier points; None if the start raises this error instead."""


@dataclass(frozen=True)
class AlreadyActive:
    """A run already has a job or a process, so nothing was started."""

    status: RunStatus
    code_changes: str = ""
    """A sentence about changes of the code since the run was submitted; empty if there are none."""


@dataclass(frozen=True)
class AlreadyFinished:
    """A run has already finished, so nothing was started."""

    status: RunStatus
    job: Job
    code_changes: str = ""


@dataclass(frozen=True)
class RunContinues:
    """An existing run starts again, from its last checkpoint if it has one."""

    status: RunStatus


def warnings_of(event: object) -> list[str]:
    """Return the warnings in an event as sentences; empty for an event without a warning.

    For callers from Python, which log warnings instead of printing every event.
    """
    match event:
        case Waiting(_, text) | Note(text):
            return [text]
        case AlreadyActive(status, code_changes) if code_changes:
            return [f"{status.name}: {code_changes}"]
        case AlreadyFinished(status, _, code_changes) if code_changes:
            return [f"{status.name}: {code_changes} again=True runs the new code."]
        case SubmittedJob(job, _, notes):
            return [f"{job.run_name}: {note}" for note in notes]

    return []


Claim = Callable[["Job", Callable[["Job"], bool]], "ClaimedRun | StartedRun"]
"""A function that claims the run of a job for a start, or returns the outcome if the run must not start.

Its second argument is a function that creates the folder of a new run and returns whether it did so: False
means that the folder exists.
"""
StartHere = Callable[["Job"], StartedRun]
"""A function that starts a job on this machine."""


def start(job: Job, *, again: bool = False, report: Report = ignore) -> Started:
    """Start a run, unless it is active or finished.

    On SLURM, the call returns when the job is queued; on this machine, when the training has ended.

    Args:
        job: the job.
        again: whether to rename the folder of an earlier run first, so that the run starts anew.
        report: called with each event.

    Returns:
        The outcome, for one run.

    Raises:
        ConfigError: the job can't start, or its folder holds another run.
        RunStateError: the run is still ending, is active although `again` is set, or was extended beyond the
            length of `job`.
        SlurmError: SLURM is missing, does not answer, or refused.
        RankFailure: the training on this machine has failed.

    Example:
        (job,) = jobs_of([["+cluster=a100x8", "nodes=3"]])
        print(start(job).runs[0].job_id)
    """
    claim = claim_for_start(again=again, report=report)
    return Started(runs=tuple(start_claimed([job], claim, report=report)))


def start_claimed(
    jobs: Sequence[Job],
    claim: Claim,
    *,
    sweep: str = "",
    points: Mapping[str, PointBegins] | None = None,
    start_here: StartHere | None = None,
    report: Report = ignore,
) -> list[StartedRun]:
    """Start jobs: submit them to SLURM, as arrays where possible, or train them one after another.

    Args:
        jobs: the jobs.
        claim: locks the run of a job for this start, or returns the outcome of a run that does not start.
        sweep: name of the sweep; empty for a single run.
        points: for a sweep, the event to report before each start, by the name of the run; None for a single
            run.
        start_here: starts a job on this machine; None: the run is claimed and trained to its end.
        report: called with each event.

    Returns:
        The outcomes, in the order of the starts. If SLURM refuses a job after it has queued other jobs of the
        sweep, the remaining runs have the outcome "refused". If a person ends a training on this machine, the
        remaining runs have no outcome.

    Raises:
        SlurmddpError: a job can't start, and SLURM has queued none of the jobs. In a sweep, the failure of a
            training on this machine is only reported.
    """
    points = points or {}
    start_here = start_here or partial(_claim_and_train, claim=claim, report=report)

    outcomes: list[StartedRun] = []
    for group in groups(jobs):
        is_array = len(group) > 1
        for job in group:
            if job.run_name in points:
                report(replace(points[job.run_name], in_array=is_array))

        try:
            if group[0].launcher == "slurm":
                outcomes += _submit(group, claim, sweep, report)
            else:
                outcomes.append(_start_point_here(group[0], start_here, points, report))
        except SlurmddpError as error:
            if not points:
                raise

            remaining = _jobs_without(outcomes, jobs)
            if not any(run.outcome == "submitted" for run in outcomes):
                report(PointsLeft(len(remaining)))
                raise

            report(PointsLeft(len(remaining), error))
            return [*outcomes, *(_refused(job, error) for job in remaining)]

        if any(run.exit_code in ENDED_BY_PERSON for run in outcomes):
            break

    return outcomes


def _jobs_without(outcomes: Sequence[StartedRun], jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs for whose runs there is no outcome yet."""
    known = {run.name for run in outcomes}
    return [job for job in jobs if job.run_name not in known]


def _refused(job: Job, error: SlurmddpError) -> StartedRun:
    return _outcome(job, "refused", exit_code=error.exit_code, reason=error.message)


def groups(jobs: Sequence[Job]) -> list[list[Job]]:
    """Divide jobs into submissions: the jobs of an array, or a single job each.

    Jobs of this machine are never in an array. SLURM is asked for the longest array that it accepts.
    """
    if len(jobs) == 1 or all(job.launcher != "slurm" for job in jobs):
        return [[job] for job in jobs]

    longest = array.longest_array(client.SlurmClient()) if client.on_path() else len(jobs)
    return array.groups(jobs, longest)


def _start_point_here(
    job: Job, start_here: StartHere, points: Mapping[str, PointBegins], report: Report
) -> StartedRun:
    """Start a job on this machine, and return its outcome.

    If the job is a point of a sweep, a failure is reported and returned instead of raised, so that the next
    point can start.
    """
    try:
        return start_here(job)
    except SlurmddpError as error:
        if job.run_name not in points:
            raise
        report(PointFailed(job.run_name, error))
        return _outcome(job, "failed", exit_code=error.exit_code, reason=error.message)


def _submit(group: Sequence[Job], claim: Claim, sweep: str, report: Report) -> list[StartedRun]:
    """Submit a job, or several jobs as an array; return the outcomes in the order of `group`."""
    outcomes: dict[str, StartedRun] = {}
    with Submission(sweep, is_array=len(group) > 1, report=report) as submission:
        # Every command locks runs in the order of their names: two commands that acquire the same locks in
        # the same order never wait for each other.
        for job in sorted(group, key=lambda job: job.run_name):
            claimed = claim(job, submission.create)
            if isinstance(claimed, StartedRun):
                outcomes[job.run_name] = claimed
            else:
                submission.add(claimed)

        job_ids = submission.submit([job.run_name for job in group])

    for job in group:
        if job.run_name in job_ids:
            outcomes[job.run_name] = _outcome(job, "submitted", job_id=job_ids[job.run_name])

    return [outcomes[job.run_name] for job in group]


def _claim_and_train(job: Job, *, claim: Claim, report: Report) -> StartedRun:
    """Claim a run, train it on this machine to its end, and return the outcome."""
    claimed = claim(job, lambda job: create(job, checked_script(job, report)))
    if isinstance(claimed, StartedRun):
        return claimed

    with claimed.lock:
        report_renamed([claimed], report)
        return _outcome(job, "trained", exit_code=train_here(claimed, report))


def _outcome(
    job: Job,
    outcome: Literal["submitted", "trained", "failed", "refused"],
    *,
    job_id: str | None = None,
    exit_code: int = EXIT_FINISHED,
    reason: str = "",
) -> StartedRun:
    return StartedRun(
        name=job.run_name,
        path=job.run_dir,
        outcome=outcome,
        job_id=job_id,
        exit_code=exit_code,
        reason=reason,
    )


def claim_for_start(*, again: bool, report: Report) -> Claim:
    """Return a function that claims new runs, and existing runs that are neither active nor finished.

    Args:
        again: whether to rename the folder of an existing run first, and claim the run as a new one.
        report: called with each event.
    """
    return partial(_claim, again=again, report=report)


def _claim(
    job: Job, create_folder: Callable[[Job], bool], *, again: bool, report: Report
) -> ClaimedRun | StartedRun:
    """Create the folder of a new run, or decide by the state of an existing run whether it starts.

    Args:
        job: the job of the run.
        create_folder: creates the run folder; returns False if it exists.
        again: whether to rename the folder of an existing run first, and claim the run as a new one.
        report: called with each event.

    Returns:
        The run with its lock; or the outcome, if the run is active or has finished.
    """
    folder = RunFolder(job.run_dir)
    is_new = not folder.path.exists() and create_folder(job)
    with hold(folder, report) as lock:
        if is_new and lock.fileno >= 0 and folder.is_untouched:
            return ClaimedRun(job, lock.hand_over(), is_new=True)

        refuse_other_run(job)
        status = status_of(folder)
        if again and not is_new:
            _refuse_rename(folder, status, report, is_held_elsewhere=lock.fileno < 0)
            return _claim_anew(job, create_folder, report)
        if lock.fileno < 0 or (status.active and not is_unanswered(folder)):
            return leave_active(status, report, changed_since(folder, job))
        if status.state == "finished":
            report_started([status.name])
            report(AlreadyFinished(status, job, changed_since(folder, job)))
            return StartedRun(name=status.name, path=folder.path, outcome="finished", job_id=status.job_id)

        refuse_extended(job)

        if status.attempts:
            report(RunContinues(status))

        return ClaimedRun(job, lock.hand_over(), is_new=is_new)


def _claim_anew(job: Job, create_folder: Callable[[Job], bool], report: Report) -> ClaimedRun | StartedRun:
    """Rename the folder of an earlier run to NAME.old-N, and claim the run as a new one.

    If the claim fails, the folder gets its old name back.
    """
    aside = rename_earlier(RunFolder(job.run_dir))
    try:
        claimed = _claim(job, create_folder, again=False, report=report)
    except BaseException:
        put_back(aside, job.run_dir)
        raise

    if isinstance(claimed, ClaimedRun):
        return replace(claimed, renamed_earlier=aside)

    # Another command has started the run since the folder was renamed, so its old name is taken: it keeps the
    # new name.
    report(EarlierRunRenamed(aside))
    return claimed


def leave_active(status: RunStatus, report: Report, code_changes: str = "") -> StartedRun:
    """Report that a run is active already, and return the outcome "active".

    Args:
        status: the status of the run.
        report: called with `AlreadyActive`.
        code_changes: a sentence about changes of the code since the run was submitted; empty: none.

    Raises:
        SlurmddpError: the state of the run is unknown, or the run is still ending (see `refuse_unclear`).
    """
    refuse_unclear(status)
    report_started([status.name])
    report(AlreadyActive(status, code_changes))
    return StartedRun(name=status.name, path=status.path, outcome="active", job_id=status.job_id)


def _refuse_rename(folder: RunFolder, status: RunStatus, report: Report, *, is_held_elsewhere: bool) -> None:
    """Raise an error if a run has, or may have, a job or a process, because its folder is to be renamed.

    A job in SLURM that the folder does not record, because sbatch did not answer, is recorded first.
    """
    if is_unanswered(folder):
        adopted = queued_jobs.settle(folder, client.SlurmClient(), lambda text: report(Info(text)))
        if adopted is not None:
            status = status_of(folder)

    is_unreadable = status.state == "unknown" and status.job_id is None
    if is_held_elsewhere or not (is_unreadable or is_unanswered(folder)):
        refuse_active(
            status,
            unchanged="The folder of an active run can't be renamed; nothing was changed.",
            hint=f"Run `slurmddp cancel {status.name}` first, then start it with --again.",
        )


def rename_earlier(folder: RunFolder) -> Path:
    """Rename a run folder to the first free `NAME.old-N`, and return the new path."""
    refuse_foreign(folder.path)
    aside = free_name(folder.path)
    folder.path.rename(aside)
    return aside
