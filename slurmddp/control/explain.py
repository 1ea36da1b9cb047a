"""Explain why a run waits: SLURM's reason, its place in the queue, limits, expected start."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from slurmddp.errors import SlurmddpError, SlurmError
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus, status
from slurmddp.settings.spec import Job
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.limits.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Wait:
    """SLURM's report about a job in its queue: the reason, the expected start, and limits."""

    reason: str = ""
    """SLURM's reason, such as `Priority`."""
    start: str = ""
    """The expected start, as SLURM prints it; empty if SLURM has no estimate."""
    ahead: int | None = None
    """Number of waiting jobs of the partition that SLURM considers earlier; None if that is not known."""
    limits: tuple[Finding, ...] = ()
    """The limits of the site that the job exceeds."""


@dataclass(frozen=True, kw_only=True)
class Explanation(RunStatus):
    """The state of a run and, if its job waits in the queue, SLURM's report about the job."""

    wait: Wait | None = None
    """SLURM's report; None if no job of the run waits in the queue, or SLURM does not answer."""


def explain(name: str | None = None, slurm: SlurmClient | None = None) -> Explanation:
    """Return the status of a run and, if its job waits in the queue, SLURM's report about the job.

    Args:
        name: name of a run, the beginning of a name, or a run folder; None: the newest run.
        slurm: the client of the SLURM to which the run belongs; None: the SLURM of this machine.

    Raises:
        RunNotFoundError: the name matches no run, or several.
    """
    folder = index.find(name)
    slurm = slurm or SlurmClient()
    run = status(folder, slurm)
    return Explanation(**vars(run), wait=_wait(folder, run, slurm))


def _wait(folder: RunFolder, run: RunStatus, slurm: SlurmClient) -> Wait | None:
    """Query SLURM about the job of a run.

    Returns:
        None if the run has no job in SLURM, the job is not pending, or SLURM does not answer.
    """
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
            limits=_limits(folder, run.job_id, slurm),
        )
    except SlurmError:
        # No error is raised, because `state` and `detail` of the run report that SLURM does not answer.
        return None


def _limits(folder: RunFolder, job_id: str, slurm: SlurmClient) -> tuple[Finding, ...]:
    """Return the limits of the site that a run's job exceeds, and licences that SLURM has dropped from it.

    Empty if the configuration of the run is unreadable.
    """
    from slurmddp.config.resume_changes import job_of_run
    from slurmddp.slurm.limits.queries import describe
    from slurmddp.slurm.limits.site import check

    # Another version of slurmddp may have written the configuration. If it is unreadable, only the limits
    # are missing in the explanation.
    with suppress(SlurmddpError):
        job = job_of_run(folder)
        exceeded = check(job, describe(slurm).with_empty_queue())
        return (*exceeded, *_dropped_licences(job, job_id, slurm))

    return ()


def _dropped_licences(job: Job, job_id: str, slurm: SlurmClient) -> list[Finding]:
    """Return a finding if SLURM no longer has the licences that a job asks for; else an empty list.

    The first releases of SLURM 25.05 drop them at a requeue, and then start the job without them.
    """
    licences = job.cluster.sbatch.get("licenses")
    facts = slurm.facts(job_id) if licences else None
    if not facts or facts.get("Licenses", "") not in ("", "(null)"):
        return []
    return [
        Finding(
            key="cluster.sbatch.licenses",
            value=str(licences),
            site="SLURM has dropped this request from the job (25.05 does so at a requeue)",
            remedy=f"`scontrol update JobId={job_id} Licenses={licences}` restores it.",
        )
    ]
