"""Decide the size of a job: nodes, ranks, GPUs, CPUs, memory and time; refuse impossible sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.host.cpus import most_ranks
from slurmddp.runs.text_format import counted
from slurmddp.settings.schema import Cluster
from slurmddp.settings.spec import GlobalBatch, Resources
from slurmddp.slurm.units import parse_minutes

LAPTOP_RANKS = 2
"""The number of ranks on this machine if it has no GPUs and nothing else is configured."""
_ONE_RANK = ("single", "data_parallel")
"""The strategies that allow only one rank."""
SIZE = ("nodes", "ranks_per_node", "gpus_per_node", "gpus")
"""The keys that decide the number of ranks."""


def resolve(
    config: Mapping[str, Any], cluster: Cluster | None, launcher: str, gpus_here: int = 0
) -> Resources:
    """Return the size of a job: what the configuration requests, else the cluster's or this machine's values.

    Args:
        config: a checked configuration.
        cluster: the chosen cluster, with the values of the configuration merged in; None for a local run.
        launcher: `slurm` or `local`.
        gpus_here: the number of GPUs of this machine.

    Raises:
        ConfigError: the size is impossible.
    """
    config = _with_nodes(config, cluster, gpus_here)
    if cluster is not None:
        _refuse_beyond_cluster(config, cluster)
    if config["spare_nodes"] and launcher == "local" and config["nodes"] == 1:
        raise ConfigError(
            f"spare_nodes={config['spare_nodes']}, but this job has one node, which is this machine.",
            hint="Use nodes=2 or more to emulate nodes on this machine, or spare_nodes=0.",
        )

    gpus = _gpus(config, cluster, gpus_here)
    ranks = _ranks(config, cluster, gpus, launcher)
    strategy = config["strategy"].get("name")
    if strategy in _ONE_RANK and config["nodes"] * ranks > 1:
        raise ConfigError(
            f"strategy={strategy} trains in one rank, but this job has {config['nodes'] * ranks} ranks.",
            hint="Choose strategy=ddp, or nodes=1 ranks_per_node=1.",
        )

    limit = config["time_limit"]
    if limit is None and cluster is not None:
        limit = cluster.time_limit

    share = 1.0
    if cluster is not None and cluster.gpus_per_node:
        share = gpus / cluster.gpus_per_node
    cpus = _share_of("cpus_per_node", config, cluster, share, minimum=ranks)
    if launcher == "slurm" and cpus is not None and ranks > most_ranks(cpus):
        raise ConfigError(
            f"ranks_per_node={ranks} is too much for a node with {counted(cpus, 'CPU')}, which takes at most "
            f"{most_ranks(cpus)} ranks.",
            hint=f"Use ranks_per_node={most_ranks(cpus)} or less, or more nodes.",
        )

    return Resources(
        nodes=config["nodes"],
        spare_nodes=config["spare_nodes"],
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        cpus_per_node=cpus,
        mem_gb=_share_of("mem_gb", config, cluster, share),
        time_limit_min=None if limit is None else parse_minutes(limit),
    )


def resize(stored: dict[str, Any], changed: Collection[str]) -> None:
    """Prepare the configuration of a run for another size; its steps keep their number of samples.

    Args:
        stored: the configuration, which is changed in place.
        changed: the keys of `SIZE` that are about to get another value.
    """
    train = stored["train"]
    if train.get("global_batch") is None and stored.get("ranks_per_node"):
        ranks = stored["nodes"] * stored["ranks_per_node"]
        train["global_batch"] = train["batch_size"] * train["accumulate"] * ranks

    # A number that is not given follows from the given numbers, as in a new run.
    if "ranks_per_node" in changed and "gpus_per_node" not in changed:
        stored["gpus_per_node"] = None
    if "gpus_per_node" in changed and "ranks_per_node" not in changed:
        stored["ranks_per_node"] = None
    if "gpus" in changed:
        stored.update(nodes=None, ranks_per_node=None, gpus_per_node=None)


def hold_global_batch(config: Mapping[str, Any], resources: Resources) -> dict[str, Any]:
    """Return the configuration with `train.global_batch` set, so that a lost node changes no step."""
    train = config["train"]
    samples = train["global_batch"] or train["batch_size"] * train["accumulate"] * resources.world_size
    return {**config, "train": {**train, "global_batch": samples}}


def check_global_batch(config: Mapping[str, Any], resources: Resources) -> None:
    """Refuse a number of ranks that can't share the samples of an optimizer step evenly."""
    samples = config["train"].get("global_batch")
    ranks = resources.nodes * resources.ranks_per_node
    if samples is None or samples % ranks == 0:
        return

    raise ConfigError(
        f"Each optimizer step has {samples} samples (train.global_batch), which {ranks} ranks "
        f"({resources.nodes} node(s) with {resources.ranks_per_node}) can't share evenly.",
        hint=f"Numbers of ranks that work: {GlobalBatch(samples).world_sizes(ranks)}.",
    )


def _with_nodes(config: Mapping[str, Any], cluster: Cluster | None, gpus_here: int) -> dict[str, Any]:
    """Return the configuration with its number of nodes; `gpus` is split evenly among the fewest nodes.

    A remainder is refused, because the job would have another number of GPUs than requested.
    """
    gpus = config["gpus"]
    nodes = config["nodes"]
    per_node = config["gpus_per_node"]
    if gpus is None:
        return {**config, "nodes": nodes or 1}

    if cluster is not None:
        available = per_node or cluster.gpus_per_node
        place = f"a node of cluster {cluster.name}"
    else:
        available = per_node or gpus_here
        place = "this machine"
    if not available:
        raise ConfigError(
            f"gpus={gpus}, but {place} has no GPUs.",
            hint="Omit gpus=, or choose a cluster that has GPUs.",
        )

    if nodes:
        planned = nodes
    elif cluster is None and per_node is None:
        planned = 1
    else:
        planned = -(-gpus // available)

    share = -(-gpus // planned)
    if share > available:
        omit_nodes = ", or omit nodes=" if nodes and cluster is not None else ""
        raise ConfigError(
            f"gpus={gpus} is {share} on each of {planned} node(s), but {place} has {available}.",
            hint=f"Use gpus={available * planned} or fewer{omit_nodes}.",
        )
    if gpus % planned or per_node not in (None, share):
        nodes_text = f"{planned} node(s)"
        if per_node is not None:
            nodes_text += f" with gpus_per_node={per_node}"
        raise ConfigError(
            f"gpus={gpus} can't be shared evenly by {nodes_text}.",
            hint=f"Use {' or '.join(_even_settings(gpus, planned, nodes, per_node))}.",
        )

    return {**config, "nodes": planned, "gpus_per_node": share}


def _even_settings(gpus: int, planned: int, nodes: int | None, per_node: int | None) -> list[str]:
    """Return settings that share GPUs evenly and are near to `gpus` GPUs on `planned` nodes.

    Args:
        gpus: the requested number of GPUs.
        planned: the fewest nodes that hold them.
        nodes: the requested number of nodes, which stays.
        per_node: the requested number of GPUs on each node, which stays.
    """
    if nodes and per_node:
        return [f"gpus={nodes * per_node}"]

    unit = nodes or per_node or planned
    fewer = gpus // unit * unit
    settings = [f"gpus={size}" for size in (fewer, fewer + unit) if size]
    if nodes or per_node:
        return settings

    even = next(count for count in range(planned, gpus + 1) if gpus % count == 0)
    return [*settings, f"nodes={even} for {gpus // even} on each"]


def _refuse_beyond_cluster(config: Mapping[str, Any], cluster: Cluster) -> None:
    """Refuse more nodes or GPUs than the cluster's file allows."""
    nodes = config["nodes"]
    spares = config["spare_nodes"]
    max_nodes = cluster.max_nodes
    if max_nodes is not None and nodes + spares > max_nodes:
        requested = f"nodes={nodes}"
        fewer = f"nodes={max_nodes} or fewer"
        if spares:
            requested += f" with spare_nodes={spares}"
            fewer = f"{max_nodes} nodes or fewer in all"
        raise ConfigError(
            f"{requested} is more than the {max_nodes} that cluster {cluster.name} gives one job (its "
            "max_nodes).",
            hint=f"Use {fewer}, or choose another cluster.",
        )

    gpus = config["gpus_per_node"]
    if gpus is not None and gpus > cluster.gpus_per_node:
        available = "no GPUs"
        fewer = "gpus_per_node=0"
        if cluster.gpus_per_node:
            available = f"{cluster.gpus_per_node} GPUs"
            fewer = f"gpus_per_node={cluster.gpus_per_node} or less"
        raise ConfigError(
            f"gpus_per_node={gpus} is more than a node of cluster {cluster.name} has ({available}).",
            hint=f"Use {fewer}, or choose another cluster.",
        )


def _gpus(config: Mapping[str, Any], cluster: Cluster | None, gpus_here: int) -> int:
    """Return the number of GPUs on each node: all of them, but no more than ranks."""
    if config["gpus_per_node"] is not None:
        return int(config["gpus_per_node"])

    available = gpus_here if cluster is None else cluster.gpus_per_node
    ranks = config["ranks_per_node"]
    if ranks is None:
        return available
    if cluster is not None and 0 < available < ranks:
        raise ConfigError(
            f"ranks_per_node={ranks} is more than the {available} GPUs of a node of cluster {cluster.name}.",
            hint=f"Each rank needs its own GPU: use ranks_per_node={available} or less, or gpus_per_node=0.",
        )
    return min(available, int(ranks))


def _ranks(config: Mapping[str, Any], cluster: Cluster | None, gpus: int, launcher: str) -> int:
    """Return the number of ranks on each node: as configured, else a rank for each GPU, else a default."""
    requested = config["ranks_per_node"]
    if requested is not None:
        if launcher == "slurm" and gpus and requested != gpus:
            raise ConfigError(
                f"ranks_per_node={requested} and gpus_per_node={gpus} don't fit: each rank has one GPU.",
                hint="Give only one of these settings.",
            )
        return int(requested)

    if gpus:
        return gpus
    if cluster is not None:
        return cluster.ranks_per_node or 1
    return 1 if config["strategy"].get("name") in _ONE_RANK else LAPTOP_RANKS


def _share_of(
    key: str, config: Mapping[str, Any], cluster: Cluster | None, share: float, minimum: int | None = None
) -> Any:
    """Return the CPUs or GiB of each node to request.

    If the configuration gives no number, a job with a share of a node's GPUs gets the same share of the
    cluster's CPUs and memory.

    Args:
        key: `cpus_per_node` or `mem_gb`.
        config: the configuration.
        cluster: the cluster, if any.
        share: the share of a node's GPUs.
        minimum: the smallest whole number to request; None for a number with a fraction.
    """
    if cluster is None or config[key] is not None:
        return config[key]

    whole = getattr(cluster, key)
    if whole is None or share in (0, 1):
        return whole
    if minimum is None:
        return round(whole * share, 3)
    return min(max(int(whole * share), minimum), whole)
