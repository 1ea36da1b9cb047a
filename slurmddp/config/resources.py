"""Decide the size of a job: nodes, ranks, GPUs, CPUs, memory and time; refuse impossible sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.host.cpu_shares import most_ranks
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
    """Return the size of a job.

    A number that is missing in the configuration comes from the cluster file or from this machine.

    Args:
        config: a checked configuration.
        cluster: the chosen cluster, with the run's partition, account and qos; None if none is chosen.
        launcher: `slurm` or `local`.
        gpus_here: the number of GPUs of this machine, for a job without a cluster.

    Raises:
        ConfigError: the size is impossible, such as more GPUs than the nodes have.
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
    """Prepare the configuration of a run for another number of ranks.

    `train.global_batch` is set, so that an optimizer step keeps its number of samples. Keys that depend on
    the changed keys become null.

    Args:
        stored: the configuration of the run, which is changed in place.
        changed: the keys of `SIZE` that the caller changes afterwards.
    """
    train = stored["train"]
    if train.get("global_batch") is None and stored.get("ranks_per_node"):
        ranks = stored["nodes"] * stored["ranks_per_node"]
        train["global_batch"] = train["batch_size"] * train["accumulate"] * ranks

    # Null means that `resolve` computes the number from the changed keys, as for a new run.
    if "ranks_per_node" in changed and "gpus_per_node" not in changed:
        stored["gpus_per_node"] = None
    if "gpus_per_node" in changed and "ranks_per_node" not in changed:
        stored["ranks_per_node"] = None
    if "gpus" in changed:
        stored.update(nodes=None, ranks_per_node=None, gpus_per_node=None)


def hold_global_batch(config: Mapping[str, Any], resources: Resources) -> dict[str, Any]:
    """Return the configuration with `train.global_batch` set to the samples of a step on the present ranks.

    Then an optimizer step keeps its number of samples after the loss of a node.
    """
    train = config["train"]
    samples = train["global_batch"] or train["batch_size"] * train["accumulate"] * resources.world_size
    return {**config, "train": {**train, "global_batch": samples}}


def check_global_batch(config: Mapping[str, Any], resources: Resources) -> None:
    """Raise ConfigError if the ranks can't share `train.global_batch` evenly."""
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
    """Return the configuration with `nodes` set.

    If `gpus` is given, the GPUs are split evenly among the fewest nodes that have them, and `gpus_per_node`
    is set, too.

    Raises:
        ConfigError: the nodes have no GPUs or too few, or the GPUs can't be split evenly.
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
    """Return settings for an error message, each of which splits a similar number of GPUs evenly.

    Args:
        gpus: the requested number of GPUs.
        planned: the smallest number of nodes that have these GPUs.
        nodes: the requested number of nodes, which the settings keep; None if none was requested.
        per_node: the requested number of GPUs on each node, which the settings keep; None as for `nodes`.
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
    """Raise ConfigError for more nodes or GPUs per node than `max_nodes` and `gpus_per_node` of a cluster."""
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
            f"{requested} is more than max_nodes={max_nodes} of cluster {cluster.name}, the largest number "
            "of nodes of one job.",
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
    """Return the number of GPUs to use on each node.

    If `gpus_per_node` is not given, the result is all GPUs of a node, but no more than `ranks_per_node`.

    Raises:
        ConfigError: a node of the cluster has GPUs, but fewer than ranks.
    """
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
    """Return the number of ranks on each node.

    If `ranks_per_node` is not given, the result is one rank for each GPU. Without GPUs, it is the cluster's
    number (or 1), or `LAPTOP_RANKS` on this machine (1 for strategies that allow only one rank).

    Raises:
        ConfigError: a SLURM job uses GPUs, but not one for each rank.
    """
    requested = config["ranks_per_node"]
    if requested is not None:
        if launcher == "slurm" and gpus and requested != gpus:
            raise ConfigError(
                f"ranks_per_node={requested} and gpus_per_node={gpus} contradict each other: each rank has "
                "one GPU.",
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
    """Return the number of CPUs or GiB to request on each node; None if nothing is requested.

    If the configuration gives no number, a job that uses a fraction of a node's GPUs requests the same
    fraction of the node's CPUs and memory.

    Args:
        key: `cpus_per_node` or `mem_gb`.
        config: the configuration.
        cluster: the chosen cluster, if any.
        share: the fraction of a node's GPUs that the job uses; 0 without GPUs, which requests the whole node.
        minimum: the smallest result, which is then a whole number; None permits a fraction, as for GiB.
    """
    if cluster is None or config[key] is not None:
        return config[key]

    whole = getattr(cluster, key)
    if whole is None or share in (0, 1):
        return whole
    if minimum is None:
        return round(whole * share, 3)
    return min(max(int(whole * share), minimum), whole)
