"""Resolve the size of a job: nodes, ranks, GPUs, CPUs, memory and time; refuse impossible sizes."""

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
_ONE_RANK = ("single", "data_parallel")
"""The strategies that train in one rank."""
SIZE = ("nodes", "ranks_per_node", "gpus_per_node", "gpus")
"""The keys that decide the number of ranks."""


def resolve(
    config: Mapping[str, Any], cluster: Cluster | None, launcher: str, gpus_here: int = 0
) -> Resources:
    """Return the size of a job, from the request, else the cluster, else this machine; raises ConfigError."""
    config = _planned(config, cluster, gpus_here)
    if cluster is not None:
        _within(config, cluster)
    if config["spare_nodes"] and launcher == "local" and config["nodes"] == 1:
        raise ConfigError(
            f"spare_nodes={config['spare_nodes']}, but this job has one node, which is this machine.",
            hint="Say nodes=2 or more to emulate nodes here, or spare_nodes=0.",
        )
    gpus = _gpus(config, cluster, gpus_here)
    ranks = _ranks(config, cluster, gpus, launcher)
    strategy = config["strategy"].get("name")
    if strategy in _ONE_RANK and config["nodes"] * ranks > 1:
        raise ConfigError(
            f"strategy={strategy} trains in one rank, and this job has {config['nodes'] * ranks}.",
            hint="Choose strategy=ddp, or nodes=1 ranks_per_node=1.",
        )
    limit = config["time_limit"]
    if limit is None and cluster is not None:
        limit = cluster.time_limit
    share = gpus / cluster.gpus_per_node if cluster and cluster.gpus_per_node else 1.0
    cpus = _share_of("cpus_per_node", config, cluster, share, least=ranks)
    if launcher == "slurm" and cpus is not None and ranks > most_ranks(cpus):
        raise ConfigError(
            f"ranks_per_node={ranks} is too much for a node with {counted(cpus, 'CPU')}, for at most "
            f"{most_ranks(cpus)} ranks.",
            hint=f"Say ranks_per_node={most_ranks(cpus)} or less, or more nodes.",
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
    """Prepare the configuration of a run for another size: its steps keep their number of samples.

    Args:
        stored: the configuration, which is changed in place.
        changed: the keys of `SIZE` that get another value.
    """
    train = stored["train"]
    if train.get("global_batch") is None and stored.get("ranks_per_node"):
        ranks = stored["nodes"] * stored["ranks_per_node"]
        train["global_batch"] = train["batch_size"] * train["accumulate"] * ranks
    on_each = ("ranks_per_node", "gpus_per_node")
    for key, other in (on_each, on_each[::-1]):
        if key in changed and other not in changed:
            stored[other] = None
    if "gpus" in changed:
        stored.update(dict.fromkeys(("nodes", *on_each)))


def hold_global_batch(config: Mapping[str, Any], resources: Resources) -> dict[str, Any]:
    """Return the configuration with `train.global_batch` set, for a run that may lose nodes."""
    train = config["train"]
    samples = train["global_batch"] or train["batch_size"] * train["accumulate"] * resources.world_size
    return {**config, "train": {**train, "global_batch": samples}}


def check_global_batch(config: Mapping[str, Any], resources: Resources) -> None:
    """Refuse a number of ranks that can't share the samples of a step evenly."""
    samples = config["train"].get("global_batch")
    ranks = resources.nodes * resources.ranks_per_node
    if samples is None or samples % ranks == 0:
        return
    raise ConfigError(
        f"Each optimizer step has {samples} samples (train.global_batch), which {ranks} ranks "
        f"({resources.nodes} node(s) with {resources.ranks_per_node}) can't share evenly.",
        hint=f"Numbers of ranks that work: {GlobalBatch(samples).world_sizes(ranks)}.",
    )


def _planned(config: Mapping[str, Any], cluster: Cluster | None, gpus_here: int) -> dict[str, Any]:
    """Return the configuration with its number of nodes; `gpus` is split among the fewest nodes.

    Each node gets equally many. A remainder is refused: the job would have other GPUs than it asks for.
    """
    gpus, nodes, per_node = config["gpus"], config["nodes"], config["gpus_per_node"]
    if gpus is None:
        return {**config, "nodes": nodes or 1}
    most = per_node or (cluster.gpus_per_node if cluster is not None else gpus_here)
    place = f"a node of cluster {cluster.name}" if cluster is not None else "this machine"
    if not most:
        raise ConfigError(
            f"gpus={gpus}, but {place} has no GPUs.",
            hint="Leave gpus out, or choose a cluster that has some.",
        )
    planned = nodes or (1 if cluster is None and per_node is None else -(-gpus // most))
    share = -(-gpus // planned)
    if share > most:
        fewer = ", or leave nodes out" if nodes and cluster is not None else ""
        raise ConfigError(
            f"gpus={gpus} is {share} on each of {planned} node(s), but {place} has {most}.",
            hint=f"Say gpus={most * planned} or less{fewer}.",
        )
    if gpus % planned or per_node not in (None, share):
        exact = "" if per_node is None else f" with gpus_per_node={per_node}"
        raise ConfigError(
            f"gpus={gpus} can't be shared evenly by {planned} node(s){exact}.",
            hint=f"Say {' or '.join(_even_plans(gpus, planned, nodes, per_node))}.",
        )
    return {**config, "nodes": planned, "gpus_per_node": share}


def _even_plans(gpus: int, planned: int, nodes: int | None, per_node: int | None) -> list[str]:
    """Return settings near to `gpus` that fit the keys that a person gave, and the fewest even nodes."""
    if nodes and per_node:
        return [f"gpus={nodes * per_node}"]
    unit = nodes or per_node or planned
    fewer = gpus // unit * unit
    sizes = [f"gpus={size}" for size in (fewer, fewer + unit) if size]
    if nodes or per_node:
        return sizes
    even = next(count for count in range(planned, gpus + 1) if gpus % count == 0)
    return [*sizes, f"nodes={even} for {gpus // even} on each"]


def _within(config: Mapping[str, Any], cluster: Cluster) -> None:
    nodes, spares, most = config["nodes"], config["spare_nodes"], cluster.max_nodes
    if most is not None and nodes + spares > most:
        asked = f"nodes={nodes} with spare_nodes={spares}" if spares else f"nodes={nodes}"
        fewer = f"{most} nodes or less in all" if spares else f"nodes={most} or less"
        raise ConfigError(
            f"{asked} is more than the {most} that cluster {cluster.name} gives one job (its max_nodes).",
            hint=f"Say {fewer}, or choose another cluster.",
        )
    gpus = config["gpus_per_node"]
    if gpus is not None and gpus > cluster.gpus_per_node:
        has = "no GPUs"
        fewer = "gpus_per_node=0"
        if cluster.gpus_per_node:
            has = f"{cluster.gpus_per_node} GPUs"
            fewer = f"gpus_per_node={cluster.gpus_per_node} or less"
        raise ConfigError(
            f"gpus_per_node={gpus} is more than a node of cluster {cluster.name} has ({has}).",
            hint=f"Use {fewer}, or choose another cluster.",
        )


def _gpus(config: Mapping[str, Any], cluster: Cluster | None, gpus_here: int) -> int:
    if config["gpus_per_node"] is not None:
        return int(config["gpus_per_node"])
    most = cluster.gpus_per_node if cluster is not None else gpus_here
    ranks = config["ranks_per_node"]
    if cluster is not None and cluster.gpus_per_node and ranks is not None and ranks > most:
        raise ConfigError(
            f"ranks_per_node={ranks} is more than the {most} GPUs of a node of cluster {cluster.name}.",
            hint=f"Each rank has a GPU of its own: say ranks_per_node={most} or less, or gpus_per_node=0.",
        )
    return min(most, ranks) if ranks is not None else most


def _ranks(config: Mapping[str, Any], cluster: Cluster | None, gpus: int, launcher: str) -> int:
    asked = config["ranks_per_node"]
    if asked is not None:
        if launcher == "slurm" and gpus and asked != gpus:
            raise ConfigError(
                f"ranks_per_node={asked} and gpus_per_node={gpus} don't fit: each rank has one GPU.",
                hint="Give only one of the two.",
            )
        return int(asked)
    if gpus:
        return gpus
    if cluster is not None:
        return cluster.ranks_per_node or 1
    return 1 if config["strategy"].get("name") in _ONE_RANK else LAPTOP_RANKS


def _share_of(
    key: str, config: Mapping[str, Any], cluster: Cluster | None, share: float, least: int | None = None
) -> Any:
    """Return the CPUs or GiB to request: a job with `share` of a node's GPUs gets that share of the rest."""
    whole = config[key] if cluster is None or config[key] is not None else getattr(cluster, key)
    if config[key] is not None or whole is None or share in (0, 1):
        return whole
    return round(whole * share, 3) if least is None else min(max(int(whole * share), least), whole)
