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
    """Whether SLURM starts a job at its site: yes, unless there are `reasons` against the job."""

    reasons: tuple[Finding, ...] = ()
    """Why SLURM never starts the job."""
    doubts: tuple[Finding, ...] = ()
    """Findings against a job that SLURM may start nevertheless."""
    refusal: SlurmError | None = None
    """The error with which sbatch refused the job."""
    start: str = ""
    """The expected start, as a clause for a sentence; empty if sbatch was not asked or refused the job."""

    @property
    def notes(self) -> list[str]:
        return [f"This SLURM may never start the job: {finding}" for finding in self.doubts]


def refuse_misfit(job: Job, slurm: SlurmClient) -> list[str]:
    """Check before `submit` that SLURM can start a job.

    Returns:
        Warnings on why SLURM may never start the job; empty if none is known.

    Raises:
        ConfigError: SLURM would never start the job.
    """
    try:
        fit = fit_of(job, build(job.submitter, slurm).script(job), slurm)
    except SlurmError:
        # Let the submission continue: if SLURM is at fault, sbatch reports a more precise error.
        return []

    if fit.reasons:
        reasons = " ".join(map(str, fit.reasons))
        raise ConfigError(f"This SLURM would never start the job: {reasons}", hint="Nothing was queued.")
    return fit.notes


def fit_of(job: Job, script: str, slurm: SlurmClient) -> Fit:
    """Compare a job with the limits of its partitions; only if it exceeds them, ask SLURM for further facts.

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
    """Ask sbatch about a job, and divide the findings into `reasons` and `doubts`.

    Args:
        job: the job.
        findings: what the comparison has found against the job.
        site: the limits and options of the site.
        ask: asks sbatch whether it accepts the job; returns the expected start, or raises SlurmError.

    Raises:
        SlurmError: SLURM does not answer.
    """
    refusal = None
    start = ""
    try:
        start = ask()
    except SlurmError as error:
        # With `may_be_queued` SLURM has not answered, which is no refusal.
        if error.may_be_queued:
            raise
        refusal = error

    doubts = [finding for finding in findings if may_lift(job, site, finding)]
    reasons = [finding for finding in findings if finding not in doubts]
    # sbatch accepts the job, so only findings about limits remain: SLURM checks them when the job is queued.
    if refusal is None:
        reasons = [finding for finding in reasons if finding.limit]
        doubts = [finding for finding in doubts if finding.limit]
    return Fit(reasons=tuple(reasons), doubts=tuple(doubts), refusal=refusal, start=start)
