"""Compare the request of a job with the limits of the site's partitions; pure.

sbatch queues many requests that can never start, for more nodes than the partition has or more time than it
allows. Such a job waits for ever, so that the request is compared before the submission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmddp.errors import near_matches
from slurmddp.settings.spec import Job
from slurmddp.slurm.command_output import parse_facts
from slurmddp.slurm.limits import nodes
from slurmddp.slurm.limits.finding import Finding, too_long, too_many_cpus
from slurmddp.slurm.units import parse_slurm_limit


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition; None stands for no limit."""

    name: str
    is_default: bool = False
    state: str = "UP"
    max_time_min: int | None = None
    max_nodes: int | None = None
    total_nodes: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_mb: int | None = None
    """Most memory of a job on each node."""
    preempt_mode: str = "OFF"
    grace_s: int = 0
    """Seconds between the SIGTERM and the SIGKILL of a preempted job."""
    qos: str = ""
    """The quality of service whose limits hold for all jobs of the partition."""
    accounts: str = "ALL"
    qualities: str = "ALL"
    root_only: bool = False


def parse_partitions(text: str) -> dict[str, Partition]:
    """Return the partitions in the output of `scontrol -o show partition`, by name."""
    found = [parse_facts(line) for line in text.splitlines() if line.startswith("PartitionName=")]
    return {facts["PartitionName"]: _partition(facts) for facts in found}


def chosen(job: Job, partitions: Mapping[str, Partition]) -> list[Partition]:
    """Return the partitions that a job may run in: those it names, else the default."""
    asked = [name for name in (job.cluster.partition or "").split(",") if name]
    return [one for one in partitions.values() if one.name in asked or (one.is_default and not asked)]


def check(
    job: Job,
    partitions: Mapping[str, Partition],
    groups: Sequence[nodes.NodeGroup] = (),
    *,
    nodes_key: str = "nodes",
) -> list[Finding]:
    """Return a finding for each reason why these partitions would never start `job`.

    Args:
        job: the job; any of its partitions may start it.
        partitions: the partitions of the site, by name; nothing is compared if it is empty.
        groups: the nodes of the site; GPUs, CPUs and memory are compared if it is not empty.
        nodes_key: the key that holds the job's number of nodes.
    """
    if not partitions:
        return []
    asked = [name for name in (job.cluster.partition or "").split(",") if name]
    unknown = [name for name in asked if name not in partitions]
    if unknown:
        return [
            _unusable(
                name,
                f"there is no partition {name!r} here",
                f"{near_matches(name, partitions)} Set it with partition=.",
            )
            for name in unknown
        ]
    candidates = chosen(job, partitions)
    if not candidates:
        return [_unusable("null", "SLURM has no default partition here", "Name one with partition=.")]
    problems = []
    for partition in candidates:
        own = [group for group in groups if group.partition == partition.name]
        found = _misfits(job, partition, nodes_key)
        told = {one.key for one in found}
        further = nodes.misfits(job, own, partition.name, nodes_key) if own else []
        problems.append([*found, *(one for one in further if one.key not in told)])
    return [] if any(not found for found in problems) else [one for found in problems for one in found]


def _unusable(name: str, site: str, remedy: str) -> Finding:
    """Return the finding for a partition that is missing or takes no jobs."""
    return Finding(key="partition", value=name, site=site, remedy=remedy)


def _misfits(job: Job, partition: Partition, nodes_key: str) -> list[Finding]:
    source = f"partition {partition.name!r}"
    problems = _too_many_nodes(job, partition, nodes_key)
    problems += too_long(job.resources.time_limit_min, partition.max_time_min, source, "MaxTime")
    if partition.state in {"INACTIVE", "DRAIN"}:
        site = f"{source} takes no jobs now ({partition.state})"
        problems.append(_unusable(partition.name, site, "Use another partition=."))
    most = partition.max_cpus_per_node
    problems += too_many_cpus(job.resources.cpus_per_node, most, f"{source} gives {most} (MaxCPUsPerNode)")
    return [*problems, *_too_much_memory(job, partition)]


def _too_many_nodes(job: Job, partition: Partition, nodes_key: str) -> list[Finding]:
    asked = job.resources.all_nodes
    limits = {"MaxNodes": partition.max_nodes, "TotalNodes": partition.total_nodes}
    known = {name: limit for name, limit in limits.items() if limit is not None}
    source = min(known, key=lambda name: known[name], default="")
    if not source or asked <= known[source]:
        return []
    most, value, fewer = known[source], str(asked), f"{nodes_key}={known[source]} or fewer"
    if job.resources.spare_nodes:
        value = f"{job.resources.nodes} with spare_nodes={job.resources.spare_nodes}"
        fewer = f"{most} nodes or fewer in all"
    return [
        Finding(
            key=nodes_key,
            value=value,
            site=f"partition {partition.name!r} gives a job at most {most} ({source})",
            remedy=f"Use {fewer}, or another partition=.",
        )
    ]


def _too_much_memory(job: Job, partition: Partition) -> list[Finding]:
    asked, most_mb = nodes.wanted_memory_mb(job), partition.max_memory_mb
    if most_mb is None or asked <= most_mb:
        return []
    most = nodes.gib(most_mb)
    return [
        Finding(
            key="mem_gb",
            value=f"{job.resources.mem_gb:g}",
            site=f"partition {partition.name!r} gives a job {most} GiB of each node (MaxMemPerNode)",
            remedy=f"Use mem_gb={most} or less.",
        )
    ]


def _partition(facts: Mapping[str, str]) -> Partition:
    return Partition(
        name=facts["PartitionName"],
        is_default=facts.get("Default") == "YES",
        state=facts.get("State", "UP"),
        max_time_min=parse_slurm_limit(facts.get("MaxTime", "")),
        max_nodes=_number(facts.get("MaxNodes", "")),
        total_nodes=_number(facts.get("TotalNodes", "")),
        max_cpus_per_node=_number(facts.get("MaxCPUsPerNode", "")),
        max_memory_mb=_number(facts.get("MaxMemPerNode", "")),
        preempt_mode=facts.get("PreemptMode", "OFF"),
        grace_s=_number(facts.get("GraceTime", "")) or 0,
        qos=facts.get("QoS", "N/A").replace("N/A", ""),
        accounts=facts.get("AllowAccounts", "ALL"),
        qualities=facts.get("AllowQos", "ALL"),
        root_only=facts.get("RootOnly") == "YES",
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
