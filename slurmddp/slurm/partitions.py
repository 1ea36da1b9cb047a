"""Compare the request of a job with the limits of the site's partitions; pure.

sbatch queues many requests that can never start, for more nodes than the partition has or more time than it
allows. Such a job waits for ever, so that the request is compared before the submission.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurmddp.errors import near_matches
from slurmddp.slurm.units import parse_slurm_limit, render_minutes
from slurmddp.spec import Job


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition; None stands for no limit."""

    name: str
    is_default: bool = False
    state: str = "UP"
    max_time_min: int | None = None
    max_nodes: int | None = None
    total_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a SLURM."""

    partitions: Mapping[str, Partition] = field(default_factory=dict)


def parse_limits(partitions: str) -> Limits:
    """Return the limits in the output of `scontrol -o show partition`."""
    found = [_partition(line) for line in partitions.splitlines() if line.startswith("PartitionName=")]
    return Limits(partitions={partition.name: partition for partition in found})


def check(job: Job, limits: Limits) -> list[str]:
    """Return a sentence for each reason why this SLURM would never start `job`, with what to change."""
    if not limits.partitions:
        return []
    asked = job.cluster.partition
    unknown = [name for name in _names(asked) if name not in limits.partitions]
    if unknown:
        return [_unknown_partition(name, limits) for name in unknown]
    candidates = [limits.partitions[name] for name in _names(asked)] or _default(limits)
    if not candidates:
        return ["SLURM has no default partition here. Name one with partition=."]
    problems = [_misfits(job, partition) for partition in candidates]
    return [] if any(not found for found in problems) else [text for found in problems for text in found]


def _names(partition: str | None) -> list[str]:
    return [name for name in (partition or "").split(",") if name]


def _default(limits: Limits) -> list[Partition]:
    return [partition for partition in limits.partitions.values() if partition.is_default]


def _unknown_partition(name: str, limits: Limits) -> str:
    near = near_matches(name, limits.partitions)
    return f"There is no partition {name!r} here. {near} Set it with partition=."


def _misfits(job: Job, partition: Partition) -> list[str]:
    nodes, minutes = job.resources.all_nodes, job.resources.time_limit_min
    problems: list[str] = []
    most = min(
        (limit for limit in (partition.max_nodes, partition.total_nodes) if limit is not None), default=nodes
    )
    if nodes > most:
        asked, fewer = f"nodes={nodes}", f"nodes={most} or fewer"
        if job.resources.spare_nodes:
            asked = f"nodes={job.resources.nodes} with spare_nodes={job.resources.spare_nodes}"
            fewer = f"{most} nodes or fewer in all"
        problems.append(
            f"{asked} is more than partition {partition.name!r} gives a job ({most}). "
            f"Use {fewer}, or another partition=."
        )
    if minutes is not None and partition.max_time_min is not None and minutes > partition.max_time_min:
        longest = render_minutes(partition.max_time_min)
        problems.append(
            f"time_limit={render_minutes(minutes)} is longer than partition {partition.name!r} allows "
            f"({longest}). Use time_limit={longest}: training goes on in the next job by itself."
        )
    if partition.state in {"INACTIVE", "DRAIN"}:
        problems.append(
            f"Partition {partition.name!r} takes no jobs now ({partition.state}). Use another partition=."
        )
    return problems


def _partition(line: str) -> Partition:
    fields = dict(_pairs(line))
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        state=fields.get("State", "UP"),
        max_time_min=parse_slurm_limit(fields.get("MaxTime", "")),
        max_nodes=_number(fields.get("MaxNodes", "")),
        total_nodes=_number(fields.get("TotalNodes", "")),
    )


def _pairs(line: str) -> Iterable[tuple[str, str]]:
    for word in line.split():
        key, equals, value = word.partition("=")
        if equals:
            yield key, value


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
