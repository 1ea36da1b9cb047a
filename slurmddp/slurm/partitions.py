"""Compare the request of a job with the limits of the site's partitions; pure.

sbatch queues many requests that can never start, for more nodes than the partition has or more time than it
allows. Such a job waits for ever, so that the request is compared before the submission.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmddp.errors import near_matches
from slurmddp.slurm.command_output import parse_facts
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


def parse_partitions(text: str) -> dict[str, Partition]:
    """Return the partitions in the output of `scontrol -o show partition`, by name."""
    found = [parse_facts(line) for line in text.splitlines() if line.startswith("PartitionName=")]
    return {facts["PartitionName"]: _partition(facts) for facts in found}


def check(job: Job, partitions: Mapping[str, Partition]) -> list[str]:
    """Return a sentence for each reason why this SLURM would never start `job`, with what to change."""
    if not partitions:
        return []
    asked = [name for name in (job.cluster.partition or "").split(",") if name]
    unknown = [name for name in asked if name not in partitions]
    if unknown:
        return [
            f"There is no partition {name!r} here. {near_matches(name, partitions)} Set it with partition=."
            for name in unknown
        ]
    candidates = [one for one in partitions.values() if one.name in asked or (one.is_default and not asked)]
    if not candidates:
        return ["SLURM has no default partition here. Name one with partition=."]
    problems = [_misfits(job, partition) for partition in candidates]
    return [] if any(not found for found in problems) else [text for found in problems for text in found]


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


def _partition(facts: Mapping[str, str]) -> Partition:
    return Partition(
        name=facts["PartitionName"],
        is_default=facts.get("Default") == "YES",
        state=facts.get("State", "UP"),
        max_time_min=parse_slurm_limit(facts.get("MaxTime", "")),
        max_nodes=_number(facts.get("MaxNodes", "")),
        total_nodes=_number(facts.get("TotalNodes", "")),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
