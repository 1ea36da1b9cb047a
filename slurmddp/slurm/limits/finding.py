"""One reason why a request does not fit a site, and comparisons that partitions, nodes and accounts share."""

from __future__ import annotations

from dataclasses import dataclass

from slurmddp.slurm.units import render_minutes


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A key whose value the site does not allow or does not have."""

    key: str
    """The key of the configuration: `nodes`, `cluster.sbatch`."""
    value: str
    """The value in the job's configuration."""
    site: str
    """A clause: the site's limit, or the things that the site has."""
    remedy: str
    """Sentences about the key to change, and how to change it."""
    limit: str = ""
    """SLURM's name of a limit over which sbatch queues a job that then waits; empty if sbatch refuses it."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.site}. {self.remedy}"


def too_long(minutes: int | None, longest: int | None, source: str, limit: str) -> list[Finding]:
    """Return a finding if a job's time limit is above the longest one of the site; else an empty list.

    Args:
        minutes: the time limit of the job; None for a job without a time limit.
        longest: the longest time limit in minutes; None for no limit.
        source: the partition, QOS or account with the limit, for the message.
        limit: SLURM's name of the limit.
    """
    if minutes is None or longest is None or minutes <= longest:
        return []

    shown = render_minutes(longest)
    return [
        Finding(
            key="time_limit",
            value=render_minutes(minutes),
            site=f"{source} allows at most {shown} ({limit})",
            remedy=f"Use time_limit={shown}: the run continues in the next job.",
            limit=limit,
        )
    ]


def too_many_cpus(cpus: int | None, largest: int | None, site: str) -> list[Finding]:
    """Return a finding if a job asks for more CPUs on each node than the site gives; else an empty list.

    Args:
        cpus: the CPUs that the job asks for on each node; None if it asks for none.
        largest: the largest number of CPUs; None for no limit.
        site: a clause about the site's limit, for the finding.
    """
    if cpus is None or largest is None or cpus <= largest:
        return []
    remedy = f"Use cpus_per_node={largest} or fewer."
    return [Finding(key="cpus_per_node", value=str(cpus), site=site, remedy=remedy)]
