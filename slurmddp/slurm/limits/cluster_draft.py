"""Draft the cluster file of a partition from SLURM's facts; pure.

Each value has a comment with the fact that it follows from. A person adds account, set-up and the like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from slurmddp.slurm.limits.nodes import NodeGroup, gib, is_slice
from slurmddp.slurm.limits.partitions import Partition
from slurmddp.slurm.limits.site import Site
from slurmddp.slurm.units import render_minutes

LONGEST_MIN = 24 * 60
"""Minutes of a drafted time limit at most: shorter jobs start sooner, and a run continues in the next job."""
Line = tuple[str, str, str]
"""Key, value in YAML, and where the value comes from."""


def usable(site: Site) -> list[Partition]:
    """Return the partitions that take jobs of this account and have nodes."""
    with_nodes = {group.partition for group in site.groups if group.nodes}
    return [
        one
        for one in site.partitions.values()
        if one.state == "UP" and not one.root_only and one.name in with_nodes
    ]


def file_name(partition: Partition) -> str:
    """Return the name of a partition's cluster file, without its suffix."""
    return re.sub(r"[^\w.-]+", "-", partition.name).strip(".-") or "cluster"


def draft(partition: Partition, site: Site) -> str:
    """Return the text of a cluster file for `partition`."""
    everything = [group for group in site.groups if group.partition == partition.name]
    nodes = _largest_kind(everything)
    lines = [
        ("name", _scalar(file_name(partition)), f"+cluster={file_name(partition)} chooses this file"),
        ("partition", _scalar(partition.name), "scontrol show partition"),
        ("account", "null", f"yours, where the site asks for one (AllowAccounts={partition.accounts})"),
        ("qos", "null", f"null: the site's default (AllowQos={partition.qualities})"),
        ("constraint", "null", f"sinfo %f: {_features(nodes)}"),
        *_gpus(nodes, everything, site),
        _max_nodes(partition, nodes),
        *_share(partition, nodes, site),
        _time_limit(partition),
    ]
    key_width = max(len(f"{key}: {value}") for key, value, _ in lines)
    text = [f"{f'{key}: {value}':<{key_width}}  # {source}" for key, value, source in lines]
    return "\n".join([*_head(partition, everything, site), *text]) + "\n"


def _head(partition: Partition, nodes: Sequence[NodeGroup], site: Site) -> list[str]:
    cluster = site.config.get("ClusterName", "this site")
    kinds = [
        f"{group.nodes} with {group.gres or 'no GPU'}, {group.cpus} CPUs, {group.memory_mb} MB, {group.state}"
        for group in nodes
    ]
    return [
        f"# Partition {partition.name} of {cluster}, drafted by `slurmddp cluster detect`.",
        f"# Nodes: {'; '.join(kinds)}.",
        f"# {_preemption(partition, site)}",
    ]


def _preemption(partition: Partition, site: Site) -> str:
    kind = site.config.get("PreemptType", "preempt/none")
    if kind == "preempt/qos":
        return (
            "Preemption: by quality of service (preempt/qos). `sacctmgr show qos` lists GraceTime: "
            "the seconds between SIGTERM and SIGKILL of a preempted job."
        )
    if kind == "preempt/none" or "OFF" in partition.preempt_mode.split(","):
        return "Preemption: none (PreemptType, PreemptMode)."

    return (
        f"Preemption: PreemptMode={partition.preempt_mode}, GraceTime={partition.grace_s}: "
        f"a preempted job has {partition.grace_s} s between SIGTERM and SIGKILL."
    )


def _largest_kind(nodes: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Return the nodes with the GPUs of which the partition has most; without GPUs all nodes.

    Whole GPUs come before parts of GPUs, on which ranks of one job can't exchange data by NCCL.
    """
    sums: dict[tuple[tuple[str, int], ...], tuple[int, int]] = {}
    for group in nodes:
        whole, all_gpus = sums.get(group.gpus, (0, 0))
        whole += group.nodes * sum(count for kind, count in group.gpus if not is_slice(kind))
        sums[group.gpus] = (whole, all_gpus + group.nodes * group.gpu_count())
    largest = max(sums, key=lambda gpus: sums[gpus])
    return [group for group in nodes if group.gpus == largest]


def _gpus(nodes: Sequence[NodeGroup], everything: Sequence[NodeGroup], site: Site) -> list[Line]:
    first = nodes[0]
    if not first.gpus:
        cores = first.cores_per_socket
        ranks = str(first.sockets) if cores > 1 else "null"
        source = f"sinfo %z: {first.sockets} sockets of {cores} cores"
        return [("gpus_per_node", "0", "sinfo %G: none"), ("ranks_per_node", ranks, source)]
    kinds = {kind for group in everything for kind, _ in group.gpus}
    (kind, count), *others = sorted(first.gpus, key=lambda gpus: (is_slice(gpus[0]), -gpus[1]))
    is_named = bool(kind) and len(kinds) > 1
    wanted = count if is_named or not others else first.gpu_count()
    plugin = site.config.get("SelectType", "unknown")
    dialect = "gpus-per-node" if plugin.endswith("cons_tres") else "gres"
    why = f"the partition also has {', '.join(sorted(kinds - {kind, ''}))}" if is_named else "null: any type"
    return [
        ("gpus_per_node", str(wanted), f"sinfo %G: {first.gres}"),
        ("gpu_type", _scalar(kind) if is_named else "null", f"{why} (sinfo %G)"),
        ("gpu_request", dialect, f"scontrol show config: SelectType={plugin}"),
    ]


def _max_nodes(partition: Partition, nodes: Sequence[NodeGroup]) -> Line:
    count = sum(group.nodes for group in nodes)
    limit = partition.max_nodes
    shown = "UNLIMITED" if limit is None else limit
    return "max_nodes", str(min(count, limit or count)), f"MaxNodes={shown}; {count} such nodes (sinfo %D)"


def _share(partition: Partition, nodes: Sequence[NodeGroup], site: Site) -> list[Line]:
    """Return the lines of CPUs and memory: all that each of the nodes has."""
    cpus, memory = min(group.cpus for group in nodes), min(group.memory_mb for group in nodes)
    allowed, gpus = partition.max_cpus_per_node, nodes[0].gpu_count()
    reserved_cpus = max(group.reserved_cpus for group in nodes)
    reserved_mb = max(group.reserved_mb for group in nodes)
    source = f"sinfo %c: {cpus + reserved_cpus}"
    source += f"; {reserved_cpus} for the system (CoreSpecCount)" if reserved_cpus else ""
    source += f"; MaxCPUsPerNode={allowed}" if allowed is not None else ""
    cpus = min(cpus, allowed or cpus)
    source += f"; {cpus // gpus} for each GPU" if gpus else ""
    lines = [("cpus_per_node", str(cpus), source)]
    parameters = site.config.get("SelectTypeParameters", "")
    if "MEMORY" not in parameters.upper():
        found = parameters or "unknown"
        return [*lines, ("mem_request", "none", f"memory is not allocated (SelectTypeParameters={found})")]
    most = partition.max_memory_mb
    limit = f"; {reserved_mb} MB for the system (MemSpecLimit)" if reserved_mb else ""
    limit += f"; MaxMemPerNode={most}" if most is not None else ""
    return [
        *lines,
        ("mem_gb", gib(min(memory, most or memory)), f"GiB; sinfo %m: {memory + reserved_mb} MB{limit}"),
        ("mem_request", "mem", f"memory is allocated (SelectTypeParameters={parameters})"),
    ]


def _time_limit(partition: Partition) -> Line:
    longest = partition.max_time_min
    shown = "UNLIMITED" if longest is None else render_minutes(longest)
    minutes = min(LONGEST_MIN, longest or LONGEST_MIN)
    return (
        "time_limit",
        json.dumps(render_minutes(minutes)),
        f"MaxTime={shown}; a run continues in the next job",
    )


def _features(nodes: Sequence[NodeGroup]) -> str:
    names = dict.fromkeys(feature for group in nodes for feature in group.features)
    return ", ".join(names) or "none"


def _scalar(text: str) -> str:
    """Return a text in YAML; in quotes if YAML could read something else."""
    plain = re.fullmatch(r"[A-Za-z][\w.-]*", text) and text.lower() not in _YAML_WORDS
    return text if plain else json.dumps(text)


_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
