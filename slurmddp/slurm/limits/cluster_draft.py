"""Draft the cluster file of a partition from SLURM's facts; pure.

Each value has a comment with the fact from which it follows. The user adds the account, `setup` lines and
other keys that SLURM does not show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from slurmddp.settings.json_schema import mode_line
from slurmddp.slurm.limits.nodes import NodeGroup, gib, is_slice
from slurmddp.slurm.limits.partitions import Partition
from slurmddp.slurm.limits.site import Site
from slurmddp.slurm.limits.site_rules import private_tmp, requeue_delay
from slurmddp.slurm.units import render_minutes

LONGEST_MIN = 24 * 60
"""The longest drafted time limit, in minutes. A short job starts sooner, and the run continues in the next
job."""
Line = tuple[str, str, str]
"""A key, its value as YAML, and the fact from which the value follows."""
_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML reads as a bool or null, unless they are quoted."""


def usable(site: Site) -> list[Partition]:
    """Return the partitions that have nodes, are UP, and are not reserved for root."""
    with_nodes = {group.partition for group in site.groups if group.nodes}
    return [
        partition
        for partition in site.partitions.values()
        if partition.state == "UP" and not partition.root_only and partition.name in with_nodes
    ]


def file_name(partition: Partition) -> str:
    """Return the name of a partition's cluster file, without the suffix `.yaml`."""
    return re.sub(r"[^\w.-]+", "-", partition.name).strip(".-") or "cluster"


def draft(partition: Partition, site: Site) -> str:
    """Return the text of a cluster file for `partition`."""
    all_nodes = [group for group in site.groups if group.partition == partition.name]
    nodes = _largest_kind(all_nodes)
    lines = [
        ("name", _scalar(file_name(partition)), f"+cluster={file_name(partition)} chooses this file"),
        ("partition", _scalar(partition.name), "scontrol show partition"),
        ("account", "null", f"yours, where the site asks for one (AllowAccounts={partition.accounts})"),
        ("qos", "null", f"null: the site's default (AllowQos={partition.qualities})"),
        ("constraint", "null", f"sinfo %f: {_features(nodes)}"),
        *_gpus(nodes, all_nodes, site),
        _max_nodes(partition, nodes),
        _cpus(partition, nodes),
        *_memory(partition, nodes, site),
        _time_limit(partition),
    ]

    width = max(len(f"{key}: {value}") for key, value, _ in lines)
    text = [f"{f'{key}: {value}':<{width}}  # {source}" for key, value, source in lines]
    return "\n".join([*_head(partition, all_nodes, site), *text]) + "\n"


def _head(partition: Partition, nodes: Sequence[NodeGroup], site: Site) -> list[str]:
    """Return the comments at the top of a cluster file: partition, kinds of nodes, preemption."""
    cluster = site.config.get("ClusterName", "this site")
    kinds = [
        f"{group.nodes} with {group.gres or 'no GPU'}, {group.cpus} CPUs, {group.memory_mb} MB, {group.state}"
        for group in nodes
    ]
    return [
        mode_line("cluster"),
        f"# Partition {partition.name} of {cluster}, drafted by `slurmddp cluster detect`.",
        f"# Nodes: {'; '.join(kinds)}.",
        f"# {_preemption(partition, site)}",
        f"# {requeue_delay(site.config)}",
        *(f"# {rule}" for rule in [private_tmp(site.config)] if rule),
    ]


def _preemption(partition: Partition, site: Site) -> str:
    """Return a sentence about the preemption of the partition's jobs."""
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
    """Return the nodes with the most frequent kind of GPUs; all nodes if the partition has no GPUs."""
    sums: dict[tuple[tuple[str, int], ...], tuple[int, int]] = {}
    for group in nodes:
        whole, all_gpus = sums.get(group.gpus, (0, 0))
        whole += group.nodes * sum(count for kind, count in group.gpus if not is_slice(kind))
        sums[group.gpus] = (whole, all_gpus + group.nodes * group.gpu_count())

    # Whole GPUs take precedence over slices of GPUs (MIG), between which NCCL can't connect the ranks of a
    # job.
    largest = max(sums, key=lambda gpus: sums[gpus])
    return [group for group in nodes if group.gpus == largest]


def _gpus(nodes: Sequence[NodeGroup], all_nodes: Sequence[NodeGroup], site: Site) -> list[Line]:
    """Return the lines about the GPUs of a node; for nodes without GPUs, about the number of ranks.

    Args:
        nodes: the nodes for which the file is drafted; their GPUs are equal.
        all_nodes: all nodes of the partition.
        site: the site.
    """
    first = nodes[0]
    if not first.gpus:
        cores = first.cores_per_socket
        ranks = str(first.sockets) if cores > 1 else "null"
        source = f"sinfo %z: {first.sockets} sockets of {cores} cores"
        return [("gpus_per_node", "0", "sinfo %G: none"), ("ranks_per_node", ranks, source)]

    # A job must name the type of its GPUs only if the partition has several types.
    kinds = {kind for group in all_nodes for kind, _ in group.gpus}
    (kind, count), *others = sorted(first.gpus, key=lambda gpus: (is_slice(gpus[0]), -gpus[1]))
    gpu_type = ("gpu_type", "null", "null: any type (sinfo %G)")
    if kind and len(kinds) > 1:
        other_kinds = ", ".join(name or "GPUs without a type" for name in sorted(kinds - {kind}))
        gpu_type = ("gpu_type", _scalar(kind), f"the partition also has {other_kinds} (sinfo %G)")
    elif others:
        count = first.gpu_count()

    plugin = site.config.get("SelectType", "unknown")
    # The option --gpus-per-node exists only with the plugin select/cons_tres.
    dialect = "gpus-per-node" if plugin.endswith("cons_tres") else "gres"
    return [
        ("gpus_per_node", str(count), f"sinfo %G: {first.gres}"),
        gpu_type,
        ("gpu_request", dialect, f"scontrol show config: SelectType={plugin}"),
    ]


def _max_nodes(partition: Partition, nodes: Sequence[NodeGroup]) -> Line:
    """Return the line `max_nodes`: the number of `nodes`, but no more than the partition's MaxNodes."""
    count = sum(group.nodes for group in nodes)
    limit = partition.max_nodes
    shown = "UNLIMITED" if limit is None else limit
    return "max_nodes", str(min(count, limit or count)), f"MaxNodes={shown}; {count} such nodes (sinfo %D)"


def _cpus(partition: Partition, nodes: Sequence[NodeGroup]) -> Line:
    """Return the line `cpus_per_node`: the CPUs of the smallest node that jobs may use."""
    cpus = min(group.cpus for group in nodes)
    reserved = max(group.reserved_cpus for group in nodes)
    source = f"sinfo %c: {cpus + reserved}"
    if reserved:
        source += f"; {reserved} for the system (CoreSpecCount)"

    allowed = partition.max_cpus_per_node
    if allowed is not None:
        source += f"; MaxCPUsPerNode={allowed}"
        cpus = min(cpus, allowed or cpus)

    gpus = nodes[0].gpu_count()
    if gpus:
        source += f"; {cpus // gpus} for each GPU"
    return "cpus_per_node", str(cpus), source


def _memory(partition: Partition, nodes: Sequence[NodeGroup], site: Site) -> list[Line]:
    """Return the lines about the memory of each node."""
    parameters = site.config.get("SelectTypeParameters", "")
    # SLURM allocates memory only if SelectTypeParameters contains a value such as CR_Core_Memory.
    if "MEMORY" not in parameters.upper():
        source = f"memory is not allocated (SelectTypeParameters={parameters or 'unknown'})"
        return [("mem_request", "none", source)]

    memory_mb = min(group.memory_mb for group in nodes)
    reserved_mb = max(group.reserved_mb for group in nodes)
    source = f"GiB; sinfo %m: {memory_mb + reserved_mb} MB"
    if reserved_mb:
        source += f"; {reserved_mb} MB for the system (MemSpecLimit)"

    largest_mb = partition.max_memory_mb
    if largest_mb is not None:
        source += f"; MaxMemPerNode={largest_mb}"
        memory_mb = min(memory_mb, largest_mb or memory_mb)

    return [
        ("mem_gb", gib(memory_mb), source),
        ("mem_request", "mem", f"memory is allocated (SelectTypeParameters={parameters})"),
    ]


def _time_limit(partition: Partition) -> Line:
    """Return the line `time_limit`: the partition's MaxTime, but no more than `LONGEST_MIN`."""
    longest = partition.max_time_min
    shown = "UNLIMITED" if longest is None else render_minutes(longest)
    minutes = min(LONGEST_MIN, longest or LONGEST_MIN)
    return (
        "time_limit",
        json.dumps(render_minutes(minutes)),
        f"MaxTime={shown}; a run continues in the next job",
    )


def _features(nodes: Sequence[NodeGroup]) -> str:
    """Return the features of nodes as one text, for a comment."""
    names = dict.fromkeys(feature for group in nodes for feature in group.features)
    return ", ".join(names) or "none"


def _scalar(text: str) -> str:
    """Return a text as YAML writes it: in quotes if YAML would read the plain word as another type."""
    is_plain = re.fullmatch(r"[A-Za-z][\w.-]*", text) and text.lower() not in _YAML_WORDS
    return text if is_plain else json.dumps(text)
