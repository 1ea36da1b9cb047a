"""Read the nodes of a site from sinfo, and compare a job with the nodes of a partition; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slurmddp.environments.hostlist import expand
from slurmddp.errors import near_matches
from slurmddp.settings.spec import Job
from slurmddp.slurm.limits.finding import Finding, too_many_cpus

SINFO_FORMAT = "%R|%D|%c|%z|%m|%G|%f|%T"
"""Of `sinfo --exact`: partition, nodes, CPUs, sockets:cores:threads, MB, gres, features, state."""

_AWAY = ("down", "drain", "fail", "maint", "inval", "unknown")
"""Beginnings of the states of nodes that take no new job now."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Equal nodes of one partition."""

    partition: str
    nodes: int
    cpus: int
    sockets: int = 1
    cores_per_socket: int = 1
    memory_mb: int
    gpus: tuple[tuple[str, int], ...] = ()
    """Type and number of the GPUs of each node; an empty type if the site names none."""
    features: tuple[str, ...] = ()
    state: str = "idle"
    reserved_cpus: int = 0
    """CPUs of a node that no job gets; `cpus` is without them."""
    reserved_mb: int = 0
    """Memory of a node that no job gets; `memory_mb` is without it."""

    def gpu_count(self, kind: str | None = None) -> int:
        """Return the number of GPUs of each node, of one type or of all."""
        return sum(count for name, count in self.gpus if kind in (None, name))

    @property
    def gres(self) -> str:
        """The GPUs as SLURM writes them: `gpu:a100:8`."""
        return ",".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in self.gpus)


def parse_groups(text: str) -> tuple[NodeGroup, ...]:
    """Return the groups of nodes in the output of sinfo in `SINFO_FORMAT`; other lines are ignored."""
    rows = [line.split("|") for line in text.splitlines()]
    return tuple(_group(row) for row in rows if len(row) == 8 and row[1].isdigit())


def without_reserved(
    groups: Iterable[NodeGroup], nodes: Sequence[Mapping[str, str]]
) -> tuple[NodeGroup, ...]:
    """Return groups without the CPUs and memory that their nodes keep for the system.

    sinfo shows all that a node has.

    Args:
        groups: the groups as sinfo shows them.
        nodes: the facts of each node, as `scontrol show node` prints them.
    """
    reserved: dict[tuple[str, int, int], tuple[int, int]] = {}
    for facts in nodes:
        cpus, memory = _number(facts.get("CPUTot", "")), _number(facts.get("RealMemory", ""))
        usable = _number(facts.get("CPUEfctv", "")) or cpus
        own = (cpus - usable, _number(facts.get("MemSpecLimit", "")))
        for partition in facts.get("Partitions", "").split(","):
            # Nodes that look alike to sinfo may differ in this; what all of them have is safe.
            key = (partition, cpus, memory)
            most = reserved.get(key, (0, 0))
            reserved[key] = (max(own[0], most[0]), max(own[1], most[1]))
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
    """Return whether a type of GPU is a part of one: `1g.10gb`, `a100_3g.20gb`."""
    return re.search(r"(?<!\d)\d+g\.\d+gb", kind) is not None


def parse_gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """Return type and number of each kind of GPU in generic resources such as `gpu:a100:4(S:0-1),gpu:2`."""
    plain = re.sub(r"\([^)]*\)", "", gres)  # `(null)`, and the sockets and indices of devices
    found = []
    for name, *rest in (one.split(":") for one in plain.split(",")):
        words = [word for word in rest if word != "no_consume"]
        if name == "gpu":
            count = int(words.pop()) if words and words[-1].isdigit() else 1
            found.append((words[0] if words else "", count))
    return tuple(found)


def misfits(job: Job, nodes: Sequence[NodeGroup], partition: str, nodes_key: str) -> list[Finding]:
    """Return a finding for each thing that no node, or not enough nodes, of a partition have."""
    found = [*_features(job, nodes, partition), *_gpus(job, nodes, partition), *_sizes(job, nodes, partition)]
    if found:
        return found
    asked, enough = job.resources.all_nodes, sum(group.nodes for group in nodes if _holds(job, group))
    if asked <= enough:
        return []
    return [
        Finding(
            key=nodes_key,
            value=str(asked),
            site=f"partition {partition!r} has {enough} nodes with the GPUs, CPUs, memory and features",
            remedy=f"Use {nodes_key}={enough}, or ask for less on each node.",
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
        features=tuple(one for one in features.split(",") if one and one != "(null)"),
        state=state,
    )


def _number(text: str) -> int:
    """Return the number at the beginning of a text: sinfo appends `+` where nodes differ."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def _wanted_gpus(job: Job) -> int:
    return 0 if job.cluster.gpu_request == "none" else job.resources.gpus_per_node


def wanted_memory_mb(job: Job) -> int:
    """Return the memory in MB that a job requests on each node; 0 for a job that requests none, or all."""
    return 0 if job.cluster.mem_request == "none" else round((job.resources.mem_gb or 0) * 1024)


def _required_features(job: Job) -> tuple[str, ...]:
    """Return the features that each node must have; an empty tuple for a constraint with alternatives."""
    text = job.cluster.constraint or ""
    return () if re.search(r"[|()\[\]*!]", text) else tuple(_named_features(text))


def _named_features(constraint: str) -> list[str]:
    """Return the features between the operators of a constraint; `*` is followed by a number of nodes."""
    parts = re.split(r"[&|,()\[\]]", re.sub(r"\*\d+", "", constraint))
    # A feature after `!` may well be on no node.
    return [part.strip() for part in parts if part.strip() and not part.strip().startswith("!")]


def _holds(job: Job, group: NodeGroup) -> bool:
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
                remedy=near_matches(name, known) or "Remove it: these nodes have no features.",
            )


def _gpus(job: Job, nodes: Sequence[NodeGroup], partition: str) -> Iterator[Finding]:
    wanted, kind = _wanted_gpus(job), job.cluster.gpu_type
    if not wanted:
        return
    kinds = _in_order(name for group in nodes for name, _ in group.gpus)
    if kind is not None and kinds and kind not in kinds:
        named = [name for name in kinds if name]
        untyped = f"the GPUs of partition {partition!r} have no type"
        yield Finding(
            key="cluster.gpu_type",
            value=kind,
            site=f"partition {partition!r} has the types {', '.join(named)}" if named else untyped,
            remedy=near_matches(kind, named) or "Leave gpu_type out.",
        )
        return
    most = max((group.gpu_count(kind) for group in nodes), default=0)
    if wanted > most:
        has = f"at most {most} GPUs on a node" if most else "no GPUs that SLURM hands out"
        yield Finding(
            key="gpus_per_node",
            value=str(wanted),
            site=f"partition {partition!r} has {has}",
            remedy=f"Use gpus_per_node={most} or fewer, or another partition=."
            if most
            else "Choose another partition=. If its nodes have GPUs, set gpu_request: none there.",
        )


def _sizes(job: Job, nodes: Sequence[NodeGroup], partition: str) -> Iterator[Finding]:
    most_cpus, most_mb = max(group.cpus for group in nodes), max(group.memory_mb for group in nodes)
    site = f"the nodes of partition {partition!r} have at most {most_cpus} CPUs"
    yield from too_many_cpus(job.resources.cpus_per_node, most_cpus, site)
    if wanted_memory_mb(job) > most_mb:
        yield Finding(
            key="mem_gb",
            value=f"{job.resources.mem_gb:g}",
            site=f"the nodes of partition {partition!r} have at most {gib(most_mb)} GiB ({most_mb} MB)",
            remedy=f"Use mem_gb={gib(most_mb)} or less; 0 asks for all of a node.",
        )


def listed_nodes(job: Job) -> int | None:
    """Return how many nodes `nodelist` names if the job has more, so that SLURM adds nodes of its choice."""
    given = str(job.cluster.sbatch.get("nodelist") or "")
    if not given or "/" in given:  # With a slash it is the name of a file with nodes.
        return None
    listed = len({*expand(given)})
    return listed if listed < job.resources.all_nodes else None


def nodes_away(job: Job, nodes: Sequence[NodeGroup]) -> int:
    """Return how many nodes with the job's demands take no new job now; 0 if enough others do."""
    holding = [group for group in nodes if _holds(job, group)]
    away = sum(group.nodes for group in holding if group.state.startswith(_AWAY))
    up = sum(group.nodes for group in holding) - away
    return away if up < job.resources.all_nodes else 0


def beyond_nodelist(job: Job) -> list[str]:
    """Return a note about a job that has more nodes than `nodelist` names."""
    if (listed := listed_nodes(job)) is None:
        return []
    return [
        f"cluster.sbatch.nodelist={job.cluster.sbatch['nodelist']} names {listed} of the job's "
        f"{job.resources.all_nodes} nodes; SLURM chooses the others. Use nodes={listed} to stay on the list."
    ]


def gib(megabytes: int) -> str:
    """Return SLURM's megabytes as GiB, rounded down to a tenth."""
    return f"{megabytes * 10 // 1024 / 10:g}"


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
