"""Decide what follows from the findings of a preflight: which nodes are faulty, and which can be excluded."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from slurmddp.environments.rank_info import RankInfo
from slurmddp.training.preflight.checks import NOBODY, NODE, RUN, NodeFault
from slurmddp.training.preflight.pairs import Pair, describe, faulty_nodes

SKEW_WARNED_S = 2.0
"""Seconds by which a node's clock may differ from most others before slurmddp warns of it."""
SKEW_REFUSED_S = 60.0
"""Seconds by which a node's clock may differ from most others before the node counts as unhealthy."""


def node_names(info: RankInfo) -> list[str]:
    """Return the names of all nodes, by node rank: host names, or `node N` if host names are not unique."""
    if len(set(info.hosts)) == info.nodes and not info.emulated:
        return [socket.gethostname()] if info.hosts == ("localhost",) else list(info.hosts)

    return [f"node {node}" for node in range(info.nodes)]


def can_exclude(unhealthy: Mapping[str, str], info: RankInfo) -> bool:
    """Decide whether SLURM can exclude these nodes: it knows their names, and other nodes may be healthy."""
    known = info.environment == "slurm" and not info.emulated and set(unhealthy) <= set(info.hosts)
    return known and others_may_be_healthy(unhealthy, info.nodes)


def others_may_be_healthy(unhealthy: Mapping[str, str], nodes: int) -> bool:
    """Decide whether at most half of the nodes failed, or there is one node only.

    If more nodes fail, the cause is the cluster or the run, and other nodes would fail too.
    """
    return 2 * len(unhealthy) <= nodes or nodes == 1


def suspects(events: Iterable[Mapping[str, Any]], attempt: int, names: Sequence[str]) -> set[int]:
    """Return the nodes whose only failed exchange in this attempt was with a node that was replaced since.

    When two nodes fail only with each other, one of them is replaced by a spare node. If the other one fails
    again, it is the faulty one.

    Args:
        events: the events of the run.
        attempt: the current attempt; only its preflights count.
        names: the names of the nodes now, by node rank.
    """
    suspected: set[str] = set()
    for event in events:
        if event.get("event") == "preflight" and event.get("attempt") == attempt:
            pairs = event.get("pairs", [])
            counts = Counter(name for pair in pairs for name in pair)
            isolated = [pair for pair in pairs if all(counts[name] == 1 for name in pair)]
            suspected.update(name for pair in isolated for name in pair)

    return {node for node, name in enumerate(names) if name in suspected}


def find_faulty(
    failed: Mapping[Pair, str], names: Sequence[str], suspected: Collection[int] = ()
) -> list[NodeFault]:
    """Return a finding for each node that the failed exchanges show to be faulty (see `faulty_nodes`).

    Args:
        failed: the failed pairs with their reasons.
        names: the names of all nodes, by node rank.
        suspected: the result of `suspects`.
    """
    nodes = faulty_nodes(failed, suspected)
    hint = "Have its network examined: interface, cable, firewall."
    fault = NODE if 2 * len(nodes) <= len(names) else RUN
    return [
        NodeFault(node=names[node], text=describe(node, failed, names, suspected), hint=hint, fault=fault)
        for node in nodes
    ]


def check_clocks(
    names: Sequence[str], stamps: Sequence[float], after: float, before: float
) -> list[NodeFault]:
    """Return a finding for each clock that differs from the median clock by more than `SKEW_WARNED_S`.

    A stamp outside of `after` to `before` shows by how much at least a clock is wrong. A stamp between them
    counts as right, so that slow answers cause no warning.

    Args:
        names: the names of all nodes, by node rank.
        stamps: the time at each node, in seconds since the epoch by the node's clock.
        after: a time before all stamps, by rank 0's clock.
        before: a time after all stamps, by rank 0's clock.
    """
    offsets = [min(0.0, stamp - after) + max(0.0, stamp - before) for stamp in stamps]
    median = sorted(offsets)[(len(offsets) - 1) // 2]

    hint = "Have its time service (chrony, ntpd) examined: ranks stop before the time limit by this clock."
    findings = []
    for name, offset in zip(names, offsets, strict=True):
        skew_s = abs(offset - median)
        if skew_s > SKEW_WARNED_S:
            direction = "ahead of" if offset > median else "behind"
            text = f"its clock is {skew_s:.1f} s {direction} most others."
            fault = NODE if skew_s > SKEW_REFUSED_S else NOBODY
            findings.append(NodeFault(node=name, text=text, hint=hint, fault=fault))

    return findings
