"""Compare the request of a job with the limits of the site's partitions; pure.

sbatch also queues jobs that can never start, such as jobs with more nodes than the partition has or more time
than it allows. They would wait for ever, so jobs are compared with the limits before the submission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmddp.near_matches import near_matches
from slurmddp.settings.spec import Job
from slurmddp.slurm.command_output import parse_facts
from slurmddp.slurm.limits import nodes
from slurmddp.slurm.limits.finding import Finding, too_long, too_many_cpus
from slurmddp.slurm.units import parse_slurm_limit


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition of the site, with its limits; None means no limit."""

    name: str
    is_default: bool = False
    state: str = "UP"
    max_time_min: int | None = None
    """The longest time limit of a job, in minutes."""
    max_nodes: int | None = None
    """The largest number of nodes of a job."""
    total_nodes: int | None = None
    max_cpus_per_node: int | None = None
    """The largest number of CPUs that a job may use on each node (MaxCPUsPerNode)."""
    max_memory_mb: int | None = None
    """The largest memory that a job may use on each node, in MB (MaxMemPerNode)."""
    preempt_mode: str = "OFF"
    grace_s: int = 0
    """Seconds between the SIGTERM and the SIGKILL of a preempted job."""
    qos: str = ""
    """The quality of service whose limits hold for all jobs of the partition; empty if it sets none."""
    accounts: str = "ALL"
    """The accounts that may use the partition (AllowAccounts)."""
    qualities: str = "ALL"
    """The qualities of service that may use the partition (AllowQos)."""
    root_only: bool = False


def parse_partitions(text: str) -> dict[str, Partition]:
    """Return the partitions in the output of `scontrol -o show partition`, by name."""
    rows = [parse_facts(line) for line in text.splitlines() if line.startswith("PartitionName=")]
    return {facts["PartitionName"]: _partition(facts) for facts in rows}


def chosen(job: Job, partitions: Mapping[str, Partition]) -> list[Partition]:
    """Return the partitions in which a job may run: those that it names, else the default partition."""
    names = _named(job)
    if names:
        return [partition for partition in partitions.values() if partition.name in names]
    return [partition for partition in partitions.values() if partition.is_default]


def _named(job: Job) -> list[str]:
    """Return the partitions that a job names; SLURM may start the job in any of them."""
    return [name for name in (job.cluster.partition or "").split(",") if name]


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
        partitions: the partitions of the site, by name; if empty, nothing is compared.
        groups: the nodes of the site; if empty, GPUs, CPUs and memory are not compared.
        nodes_key: the key to name in findings about the number of nodes: `nodes`, or `max_nodes` of a cluster
            file.
    """
    if not partitions:
        return []

    unknown = [name for name in _named(job) if name not in partitions]
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

    findings: list[Finding] = []
    for partition in candidates:
        of_partition = [group for group in groups if group.partition == partition.name]
        misfits = _misfits(job, partition, of_partition, nodes_key)
        # SLURM starts the job in any of its partitions, so one that fits is enough.
        if not misfits:
            return []
        findings += misfits
    return findings


def _unusable(name: str, site: str, remedy: str) -> Finding:
    """Return the finding for a partition that is missing or accepts no jobs."""
    return Finding(key="partition", value=name, site=site, remedy=remedy)


def _misfits(
    job: Job, partition: Partition, groups: Sequence[nodes.NodeGroup], nodes_key: str
) -> list[Finding]:
    """Return a finding for each reason why a partition, by its limits and nodes, would never start a job."""
    findings = _over_limits(job, partition, nodes_key)
    if not groups:
        return findings

    # Return only one finding for each key. A finding about the partition's limit is preferred to one about
    # its nodes.
    keys = {finding.key for finding in findings}
    of_nodes = nodes.misfits(job, groups, partition.name, nodes_key)
    return [*findings, *(finding for finding in of_nodes if finding.key not in keys)]


def _over_limits(job: Job, partition: Partition, nodes_key: str) -> list[Finding]:
    source = f"partition {partition.name!r}"
    findings = _too_many_nodes(job, partition, nodes_key)
    findings += too_long(job.resources.time_limit_min, partition.max_time_min, source, "MaxTime")
    # A partition that is DOWN gives no finding: SLURM queues its jobs, and starts them when it is UP again.
    if partition.state in {"INACTIVE", "DRAIN"}:
        site = f"{source} accepts no jobs now ({partition.state})"
        findings.append(_unusable(partition.name, site, "Use another partition=."))

    largest = partition.max_cpus_per_node
    site = f"{source} gives {largest} (MaxCPUsPerNode)"
    findings += too_many_cpus(job.resources.cpus_per_node, largest, site)
    return [*findings, *_too_much_memory(job, partition)]


def _too_many_nodes(job: Job, partition: Partition, nodes_key: str) -> list[Finding]:
    count = job.resources.all_nodes
    limits = {"MaxNodes": partition.max_nodes, "TotalNodes": partition.total_nodes}
    known = {name: limit for name, limit in limits.items() if limit is not None}
    source = min(known, key=lambda name: known[name], default="")
    if not source or count <= known[source]:
        return []

    largest = known[source]
    value = str(count)
    fewer = f"{nodes_key}={largest} or fewer"
    # The job also asks for its spare nodes, which the key `nodes` does not count.
    if job.resources.spare_nodes:
        value = f"{job.resources.nodes} with spare_nodes={job.resources.spare_nodes}"
        fewer = f"{largest} nodes or fewer in all"

    return [
        Finding(
            key=nodes_key,
            value=value,
            site=f"partition {partition.name!r} gives a job at most {largest} ({source})",
            remedy=f"Use {fewer}, or another partition=.",
        )
    ]


def _too_much_memory(job: Job, partition: Partition) -> list[Finding]:
    largest_mb = partition.max_memory_mb
    if largest_mb is None or nodes.wanted_memory_mb(job) <= largest_mb:
        return []

    largest = nodes.gib(largest_mb)
    return [
        Finding(
            key="mem_gb",
            value=f"{job.resources.mem_gb:g}",
            site=f"partition {partition.name!r} gives a job {largest} GiB of each node (MaxMemPerNode)",
            remedy=f"Use mem_gb={largest} or less.",
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
        # SLURM prints N/A for a partition without a quality of service.
        qos=facts.get("QoS", "N/A").replace("N/A", ""),
        accounts=facts.get("AllowAccounts", "ALL"),
        qualities=facts.get("AllowQos", "ALL"),
        root_only=facts.get("RootOnly") == "YES",
    )


def _number(text: str) -> int | None:
    """Return the number in a text; None for a text such as UNLIMITED or N/A, which means no limit."""
    return int(text) if text.isdigit() else None
