"""Decide whether a site starts a job: compare the job with the site's limits, and ask sbatch.

The comparison explains a refusal by keys of the configuration, but it is only a model of SLURM's rules.
Submit plugins, reservations and flags of a QOS change these rules. So a finding counts only if sbatch refuses
the job as well. sbatch queues jobs over some limits. Such a limit counts if nothing at the site can lift it.
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
    """The result of a comparison; a job is submitted unless it has reasons against it."""

    reasons: tuple[Finding, ...] = ()
    """Why SLURM never starts the job."""
    doubts: tuple[Finding, ...] = ()
    """Findings against a job that SLURM may start nevertheless."""
    refusal: SlurmError | None = None
    """The error with which sbatch refused the job."""
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
        # sbatch, which runs next, gives a better reason.
        return []

    if fit.reasons:
        reasons = " ".join(map(str, fit.reasons))
        raise ConfigError(f"This SLURM would never start the job: {reasons}", hint="Nothing was queued.")
    return fit.notes


def fit_of(job: Job, script: str, slurm: SlurmClient) -> Fit:
    """Compare a job with its partitions; ask SLURM for further facts only if the job does not fit.

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
        # Without an answer there is no refusal.
        if error.may_be_queued:
            raise
        refusal = error

    doubts = [finding for finding in findings if may_lift(job, site, finding)]
    reasons = [finding for finding in findings if finding not in doubts]
    # sbatch accepts the job, but SLURM checks limits only when the job is queued.
    if refusal is None:
        reasons = [finding for finding in reasons if finding.limit]
        doubts = [finding for finding in doubts if finding.limit]
    return Fit(reasons=tuple(reasons), doubts=tuple(doubts), refusal=refusal, start=start)
