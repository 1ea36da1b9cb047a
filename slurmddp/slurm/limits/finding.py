"""Define a finding: a reason why a job does not fit a site. Compare time limits and numbers of CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from slurmddp.slurm.units import render_minutes


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A key of a job's configuration whose value the site does not allow or can't provide."""

    key: str
    """The full name of the key, such as `nodes` or `cluster.constraint`."""
    value: str
    """The value of the key in the job's configuration, as text."""
    site: str
    """A clause about the site's limit or resources, such as "partition 'gpu' has 4 nodes"."""
    remedy: str
    """Sentences about the key to change, and how to change it."""
    limit: str = ""
    """SLURM's name of the limit, such as MaxTime, if sbatch queues jobs that exceed it; otherwise empty."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.site}. {self.remedy}"


def too_long(minutes: int | None, longest: int | None, source: str, limit: str) -> list[Finding]:
    """Return a finding if a job's time limit is longer than the site allows; else an empty list.

    Args:
        minutes: the time limit of the job; None for a job without a time limit.
        longest: the longest time limit that the site allows, in minutes; None for no limit.
        source: the partition, QOS or account that sets the limit, for the message.
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
