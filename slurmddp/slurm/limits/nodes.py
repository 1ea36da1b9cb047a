"""Read the nodes of a site from sinfo, and compare a job with the nodes of a partition; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slurmddp.environments.hostlist import expand
from slurmddp.near_matches import near_matches
from slurmddp.settings.spec import Job
from slurmddp.slurm.limits.finding import Finding, too_many_cpus

SINFO_FORMAT = "%R|%D|%c|%z|%m|%G|%f|%T"
"""Columns of `sinfo --exact`: partition, nodes, CPUs, sockets:cores:threads, MB, gres, features, state."""
_AWAY = ("down", "drain", "fail", "maint", "inval", "unknown")
"""First letters of sinfo's states for nodes that accept no new jobs at present."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition that are equal in all facts of this class, such as GPUs, memory and state."""

    partition: str
    nodes: int
    cpus: int
    sockets: int = 1
    cores_per_socket: int = 1
    memory_mb: int
    gpus: tuple[tuple[str, int], ...] = ()
    """Type and number of the GPUs of each node, one pair for each type; the type is empty if SLURM names
    none."""
    features: tuple[str, ...] = ()
    state: str = "idle"
    reserved_cpus: int = 0
    """CPUs of each node that SLURM reserves for the system; `cpus` does not count them."""
    reserved_mb: int = 0
    """Memory of each node that SLURM reserves for the system; `memory_mb` does not count it."""

    def gpu_count(self, kind: str | None = None) -> int:
        """Return the number of GPUs of the type `kind` on each node; None: of all types."""
        return sum(count for name, count in self.gpus if kind in (None, name))

    @property
    def gres(self) -> str:
        """The GPUs as SLURM prints them: `gpu:a100:8`."""
        return ",".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in self.gpus)


def parse_groups(text: str) -> tuple[NodeGroup, ...]:
    """Return the groups of nodes in the output of sinfo in `SINFO_FORMAT`; other lines are ignored."""
    rows = [line.split("|") for line in text.splitlines()]
    return tuple(_group(row) for row in rows if len(row) == 8 and row[1].isdigit())


def without_reserved(
    groups: Iterable[NodeGroup], nodes: Sequence[Mapping[str, str]]
) -> tuple[NodeGroup, ...]:
    """Return the groups without the CPUs and memory that SLURM reserves for the system on their nodes.

    sinfo shows all CPUs and memory of a node, the reserved ones included.

    Args:
        groups: the groups as sinfo shows them.
        nodes: the facts of each node, as `scontrol show node` prints them.
    """
    reserved: dict[tuple[str, int, int], tuple[int, int]] = {}
    for facts in nodes:
        cpus = _number(facts.get("CPUTot", ""))
        memory_mb = _number(facts.get("RealMemory", ""))
        # SLURM versions without CPUEfctv do not show reserved CPUs.
        reserved_cpus = cpus - (_number(facts.get("CPUEfctv", "")) or cpus)
        reserved_mb = _number(facts.get("MemSpecLimit", ""))
        for partition in facts.get("Partitions", "").split(","):
            # The nodes of a group may reserve different amounts. The largest one is subtracted, so that a job
            # fits each node.
            key = (partition, cpus, memory_mb)
            largest_cpus, largest_mb = reserved.get(key, (0, 0))
            reserved[key] = (max(reserved_cpus, largest_cpus), max(reserved_mb, largest_mb))

    return tuple(
        _reduced(group, *reserved.get((group.partition, group.cpus, group.memory_mb), (0, 0)))
        for group in groups
    )


def _reduced(group: NodeGroup, cpus: int, memory_mb: int) -> NodeGroup:
    return replace(
        group,
        cpus=group.cpus - cpus,
        memory_mb=group.memory_mb - memory_mb,
        reserved_cpus=cpus,
        reserved_mb=memory_mb,
    )


def is_slice(kind: str) -> bool:
    """Return whether a type of GPU is a slice of a GPU (MIG), such as `1g.10gb` or `a100_3g.20gb`."""
    return re.search(r"(?<!\d)\d+g\.\d+gb", kind) is not None


def parse_gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """Return type and number of the GPUs in a list of generic resources such as `gpu:a100:4(S:0-1),gpu:2`."""
    # Remove `(null)`, which means no resources, and sockets and device indices such as `(S:0-1)`.
    plain = re.sub(r"\([^)]*\)", "", gres)
    gpus = []
    for name, *rest in (resource.split(":") for resource in plain.split(",")):
        if name != "gpu":
            continue

        # `no_consume` is a flag, although it has the place of a type.
        parts = [part for part in rest if part != "no_consume"]
        count = 1
        if parts and parts[-1].isdigit():
            count = int(parts.pop())
        kind = "".join(parts[:1])
        gpus.append((kind, count))

    return tuple(gpus)


def misfits(job: Job, nodes: Sequence[NodeGroup], partition: str, nodes_key: str) -> list[Finding]:
    """Return a finding for each demand of a job that no node of a partition meets, or too few nodes."""
    findings = [
        *_features(job, nodes, partition),
        *_gpus(job, nodes, partition),
        *_sizes(job, nodes, partition),
    ]
    if findings:
        return findings

    # Each single demand is met by some node, but too few nodes may meet all demands at once.
    suitable = sum(group.nodes for group in nodes if _holds(job, group))
    if job.resources.all_nodes <= suitable:
        return []
    return [
        Finding(
            key=nodes_key,
            value=str(job.resources.all_nodes),
            site=f"partition {partition!r} has {suitable} nodes with the GPUs, CPUs, memory and features "
            "that the job asks for",
            remedy=f"Use {nodes_key}={suitable}, or ask for less on each node.",
        )
    ]


def _group(row: Sequence[str]) -> NodeGroup:
    partition, nodes, cpus, shape, memory, gres, features, state = (cell.strip() for cell in row)
    sockets, cores, *_ = [*map(_number, shape.split(":")), 1, 1]
    return NodeGroup(
        partition=partition,
        nodes=int(nodes),
        cpus=_number(cpus),
        sockets=sockets,
        cores_per_socket=cores,
        memory_mb=_number(memory),
        gpus=parse_gpus(gres),
        features=tuple(name for name in features.split(",") if name not in ("", "(null)")),
        state=state,
    )


def _number(text: str) -> int:
    """Return the number at the beginning of a text; sinfo appends `+` if the nodes of a line differ."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def _wanted_gpus(job: Job) -> int:
    """Return the number of GPUs that a job requests from SLURM on each node."""
    return 0 if job.cluster.gpu_request == "none" else job.resources.gpus_per_node


def wanted_memory_mb(job: Job) -> int:
    """Return the memory in MB that a job requests on each node; 0 if it requests none, or all of a node's."""
    if job.cluster.mem_request == "none":
        return 0
    return round((job.resources.mem_gb or 0) * 1024)


def _required_features(job: Job) -> tuple[str, ...]:
    """Return the features that every node of a job must have; empty if its constraint has alternatives."""
    text = job.cluster.constraint or ""
    if re.search(r"[|()\[\]*!]", text):
        return ()
    return tuple(_named_features(text))


def _named_features(constraint: str) -> list[str]:
    """Return the features that a constraint of sbatch requires of nodes.

    For `a100&!old` it is a100, and for `[r1*2|r2*2]` these are r1 and r2.
    """
    # In `r1*2` the number 2 is a number of nodes, which is removed.
    parts = re.split(r"[&|,()\[\]]", re.sub(r"\*\d+", "", constraint))
    # `!` before a feature excludes nodes with this feature, so it need not exist.
    return [part.strip() for part in parts if part.strip() and not part.strip().startswith("!")]


def _holds(job: Job, group: NodeGroup) -> bool:
    """Return whether each node of a group has the GPUs, CPUs, memory and features that a job asks for."""
    return (
        group.gpu_count(job.cluster.gpu_type) >= _wanted_gpus(job)
        and group.cpus >= (job.resources.cpus_per_node or 0)
        and group.memory_mb >= wanted_memory_mb(job)
        and {*_required_features(job)} <= {*group.features}
    )


def _features(job: Job, nodes: Sequence[NodeGroup], partition: str) -> Iterator[Finding]:
    known = {feature for group in nodes for feature in group.features}
    for name in _named_features(job.cluster.constraint or ""):
        if name not in known:
            yield Finding(
                key="cluster.constraint",
                value=job.cluster.constraint or "",
                site=f"no node of partition {partition!r} has the feature {name!r}",
                remedy=near_matches(name, known)
                or "Remove the constraint: the nodes of this partition have no features.",
            )


def _gpus(job: Job, nodes: Sequence[NodeGroup], partition: str) -> Iterator[Finding]:
    wanted = _wanted_gpus(job)
    kind = job.cluster.gpu_type
    if not wanted:
        return

    kinds = list(dict.fromkeys(name for group in nodes for name, _ in group.gpus))
    if kind is not None and kinds and kind not in kinds:
        named = [name for name in kinds if name]
        site = f"the GPUs of partition {partition!r} have no type"
        if named:
            site = f"partition {partition!r} has the types {', '.join(named)}"
        yield Finding(
            key="cluster.gpu_type",
            value=kind,
            site=site,
            remedy=near_matches(kind, named) or "Omit gpu_type.",
        )
        return

    largest = max((group.gpu_count(kind) for group in nodes), default=0)
    if wanted <= largest:
        return
    site = f"partition {partition!r} has at most {largest} GPUs on a node"
    remedy = f"Use gpus_per_node={largest} or fewer, or another partition=."
    # At some sites SLURM does not allocate GPUs: a job that gets a node may use all of its GPUs.
    if not largest:
        site = f"partition {partition!r} has no GPUs that SLURM allocates"
        remedy = (
            "Choose another partition=. If the nodes have GPUs, set gpu_request: none in the cluster file."
        )
    yield Finding(key="gpus_per_node", value=str(wanted), site=site, remedy=remedy)


def _sizes(job: Job, nodes: Sequence[NodeGroup], partition: str) -> Iterator[Finding]:
    largest_cpus = max(group.cpus for group in nodes)
    site = f"the nodes of partition {partition!r} have at most {largest_cpus} CPUs"
    yield from too_many_cpus(job.resources.cpus_per_node, largest_cpus, site)

    largest_mb = max(group.memory_mb for group in nodes)
    if wanted_memory_mb(job) > largest_mb:
        yield Finding(
            key="mem_gb",
            value=f"{job.resources.mem_gb:g}",
            site=f"the nodes of partition {partition!r} have at most {gib(largest_mb)} GiB ({largest_mb} MB)",
            remedy=f"Use mem_gb={gib(largest_mb)} or less; 0 asks for all memory of a node.",
        )


def listed_nodes(job: Job) -> int | None:
    """Return the number of nodes in sbatch's `nodelist`, if the job has more nodes than that; else None.

    SLURM then adds nodes of its own choice.
    """
    nodelist = str(job.cluster.sbatch.get("nodelist") or "")
    # A value with a slash is the path of a file that lists nodes. Such a file is not read.
    if not nodelist or "/" in nodelist:
        return None

    listed = len({*expand(nodelist)})
    return listed if listed < job.resources.all_nodes else None


def nodes_away(job: Job, nodes: Sequence[NodeGroup]) -> int:
    """Return how many of the nodes that the job needs are down or drained; 0 if enough other nodes are up."""
    suitable = [group for group in nodes if _holds(job, group)]
    away = sum(group.nodes for group in suitable if group.state.startswith(_AWAY))
    up = sum(group.nodes for group in suitable) - away
    return away if up < job.resources.all_nodes else 0


def beyond_nodelist(job: Job) -> list[str]:
    """Return one note if the job has more nodes than sbatch's `nodelist` names; else an empty list."""
    listed = listed_nodes(job)
    if listed is None:
        return []
    return [
        f"cluster.sbatch.nodelist={job.cluster.sbatch['nodelist']} names {listed} of the job's "
        f"{job.resources.all_nodes} nodes; SLURM chooses the others. Use nodes={listed} to stay on the list."
    ]


def gib(megabytes: int) -> str:
    """Return SLURM's megabytes (MiB) as GiB in a text, rounded down to one decimal."""
    return f"{megabytes * 10 // 1024 / 10:g}"
