"""Say whether this SLURM would start a job, for `--check` and `slurmddp cluster check`; nothing is queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurmddp.errors import EXIT_CONFIG, EXIT_FINISHED, ConfigError, SlurmError
from slurmddp.slurm.limits import partitions
from slurmddp.slurm.limits.finding import Finding
from slurmddp.slurm.limits.site import Site, check

if TYPE_CHECKING:
    from slurmddp.slurm.client import SlurmClient
    from slurmddp.spec import Job


def show(job: Job) -> int:
    """Print why this SLURM would not start a job, or when it would; return the exit code."""
    from slurmddp.slurm import client

    if job.launcher != "slurm":
        raise ConfigError(
            f"--check compares a job with SLURM, and {job.run_name} runs on this machine.",
            hint="Choose a cluster with +cluster=NAME, or leave --check out.",
        )
    slurm = client.SlurmClient()
    site = slurm.describe()
    found = check(job, site)
    start = "" if found else test(job, slurm, found)
    for one in found:
        print(one)
    if found:
        print(f"This SLURM would not start {job.run_name}. Nothing was queued or written.")
        return EXIT_CONFIG
    start = _after_downtime(job, site) or start  # sbatch's estimate ignores a partition that is down.
    expected = f", {start}" if start else ""
    print(f"This SLURM would start {job.run_name}{expected}. Nothing was queued or written.")
    return EXIT_FINISHED


def _after_downtime(job: Job, site: Site) -> str:
    """Return when the job starts, as a clause, if its partitions are down and only queue jobs now."""
    states = {one.name: one.state for one in partitions.chosen(job, site.partitions)}
    if not states or set(states.values()) != {"DOWN"}:
        return ""
    return f"once the site has partition {' or '.join(map(repr, states))} up again (DOWN now)"


def test(job: Job, slurm: SlurmClient, found: list[Finding]) -> str:
    """Ask sbatch whether it takes a job, and add its refusal to `found`.

    Returns:
        The expected start as a clause; empty if sbatch refuses the job or gives no start.

    Raises:
        SlurmError: SLURM does not answer.
    """
    from slurmddp.launchers.submit import sbatch

    try:
        return slurm.test(sbatch.build(job.submitter, slurm).script(job))
    except SlurmError as error:
        if error.may_be_queued:  # No answer, so no refusal.
            raise
        words = " ".join(error.message.split()).rstrip(".")
        found.append(Finding(key="cluster", value=job.cluster.name, site=words, remedy=error.hint))
        return ""
