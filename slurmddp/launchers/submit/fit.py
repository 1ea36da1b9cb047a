"""Decide whether a site starts a job: compare the job with the site's limits, and let sbatch judge.

The comparison explains a refusal in words of the configuration, but it is only a model of SLURM's rules.
Submit plugins, reservations and flags of a QOS change these rules. So a finding counts only if sbatch refuses
the job as well. A limit over which sbatch queues a job counts if nothing at the site can lift it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurmddp.errors import ConfigError, SlurmError
from slurmddp.launchers.submit.submitter import build
from slurmddp.settings.spec import Job
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.limits import partitions, queries
from slurmddp.slurm.limits.finding import Finding
from slurmddp.slurm.limits.site import Site, may_lift, partitions_for


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The result of a comparison; a job without reasons is submitted."""

    reasons: tuple[Finding, ...] = ()
    """Why SLURM never starts the job."""
    doubts: tuple[Finding, ...] = ()
    """What SLURM shows against the job, although it may start it."""
    refusal: SlurmError | None = None
    """The refusal of sbatch."""
    start: str = ""
    """The expected start, as a clause."""

    @property
    def notes(self) -> list[str]:
        return [f"This SLURM may never start the job: {finding}" for finding in self.doubts]


def refuse_misfit(job: Job, slurm: SlurmClient) -> list[str]:
    """Raise ConfigError if SLURM would never start `job`; call this before `submit`.

    Returns:
        Notes on why SLURM may never start the job.
    """
    try:
        fit = fit_of(job, build(job.submitter, slurm).script(job), slurm)
    except SlurmError:
        return []  # sbatch, which runs next, gives a better reason.
    if fit.reasons:
        reasons = " ".join(map(str, fit.reasons))
        raise ConfigError(f"This SLURM would never start the job: {reasons}", hint="Nothing was queued.")
    return fit.notes


def fit_of(job: Job, script: str, slurm: SlurmClient) -> Fit:
    """Compare a job with its partitions; SLURM is asked more only if the job does not fit.

    Raises:
        SlurmError: SLURM does not show its partitions.
    """
    findings = partitions.check(job, queries.partitions(slurm))
    if not findings:
        return Fit()
    try:
        site = queries.describe(slurm)
        findings = partitions.check(job, partitions_for(job, site))
        return judge(job, findings, site, lambda: slurm.test(script))
    except SlurmError:
        return Fit(doubts=tuple(findings))


def judge(job: Job, findings: Sequence[Finding], site: Site, ask: Callable[[], str]) -> Fit:
    """Divide findings into reasons and doubts by the answer of sbatch.

    Args:
        job: the job.
        findings: the findings of a comparison.
        site: the site.
        ask: asks sbatch whether it takes the job; returns the expected start.

    Raises:
        SlurmError: SLURM does not answer.
    """
    refusal = None
    start = ""
    try:
        start = ask()
    except SlurmError as error:
        if error.may_be_queued:  # No answer, so no refusal.
            raise
        refusal = error
    doubts = [finding for finding in findings if may_lift(job, site, finding)]
    certain = [finding for finding in findings if finding not in doubts]
    if refusal is None:  # sbatch takes the job; it looks at limits only later.
        certain = [finding for finding in certain if finding.limit]
        doubts = [finding for finding in doubts if finding.limit]
    return Fit(reasons=tuple(certain), doubts=tuple(doubts), refusal=refusal, start=start)
