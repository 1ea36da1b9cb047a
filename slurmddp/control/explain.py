"""Explain why a run waits: SLURM's reason, its place in the queue, limits, expected start."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from slurmddp.errors import SlurmddpError, SlurmError
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus, status
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.limits.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Wait:
    """SLURM's facts about a job that waits."""

    reason: str = ""
    """SLURM's own word."""
    start: str = ""
    """The expected start, by SLURM's clock; empty if SLURM gives none."""
    ahead: int | None = None
    """The number of waiting jobs of the partition at which SLURM looks earlier; None if not seen."""
    limits: tuple[Finding, ...] = ()
    """The limits of the site that the job exceeds."""


@dataclass(frozen=True, kw_only=True)
class Explanation(RunStatus):
    """The state of a run, and SLURM's facts about its job if that waits."""

    wait: Wait | None = None
    """None if no job of the run waits in SLURM's queue, or SLURM does not answer."""


def explain(name: str | None = None, slurm: SlurmClient | None = None) -> Explanation:
    """Return why a run waits, or the remedy of its end.

    Args:
        name: name of a run, its beginning, or a run's folder; None: the newest run.
        slurm: the SLURM of the run; None: this machine's.

    Raises:
        RunNotFoundError: there is no such run, or there are several.
    """
    folder = index.find(name)
    slurm = slurm or SlurmClient()
    run = status(folder, slurm)
    return Explanation(**vars(run), wait=_wait(folder, run, slurm))


def _wait(folder: RunFolder, run: RunStatus, slurm: SlurmClient) -> Wait | None:
    """Return the facts of the run's job if it waits in SLURM's queue."""
    if not run.active or run.job_id is None or run.launcher == "local":
        return None
    try:
        job = slurm.jobs([run.job_id]).get(run.job_id)
        if job is None or not job.pending or not job.may_be_of(run.path):
            return None
        return Wait(
            reason=job.reason,
            start=job.start,
            ahead=slurm.jobs_ahead(run.job_id),
            limits=_limits(folder, slurm),
        )
    except SlurmError:  # The state says so.
        return None


def _limits(folder: RunFolder, slurm: SlurmClient) -> tuple[Finding, ...]:
    from slurmddp.config.resume import job_of_run
    from slurmddp.slurm.limits.queries import describe
    from slurmddp.slurm.limits.site import check

    with suppress(SlurmddpError):  # A configuration of another version says nothing about the queue.
        return tuple(check(job_of_run(folder), describe(slurm).with_empty_queue()))
    return ()
