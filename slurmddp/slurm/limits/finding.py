"""One reason why a request does not fit a site; comparisons that partitions, nodes and accounts share."""

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
    """Sentences that tell the person which key to change, and how."""
    limit: str = ""
    """SLURM's name of a limit over which sbatch queues a job that then waits; empty if sbatch refuses it."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.site}. {self.remedy}"


def too_long(minutes: int | None, longest: int | None, source: str, limit: str) -> list[Finding]:
    """Return a finding if a job runs longer than the site allows.

    Args:
        minutes: the time limit of the job; None for a job without one.
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


def too_many_cpus(cpus: int | None, most: int | None, site: str) -> list[Finding]:
    """Return a finding if a job asks for more CPUs on each node than `most`; `site` says who gives these."""
    if cpus is None or most is None or cpus <= most:
        return []
    remedy = f"Use cpus_per_node={most} or fewer."
    return [Finding(key="cpus_per_node", value=str(cpus), site=site, remedy=remedy)]
