"""What follows from the findings of a preflight: whom to name, to blame, to avoid; decisions about values."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from slurmddp.environments.rank_info import RankInfo
from slurmddp.training.preflight import pairs
from slurmddp.training.preflight.checks import NOBODY, NODE, RUN, Finding
from slurmddp.training.preflight.pairs import Pair

SKEW_WARNED_S, SKEW_REFUSED_S = 2.0, 60.0


def node_names(info: RankInfo) -> list[str]:
    """Return what to call the nodes: by their names where these tell them apart."""
    if len(set(info.hosts)) == info.nodes and not info.emulated:
        return [socket.gethostname()] if info.hosts == ("localhost",) else list(info.hosts)
    return [f"node {node}" for node in range(info.nodes)]


def can_be_avoided(unfit: Mapping[str, str], info: RankInfo) -> bool:
    """Whether SLURM knows these names, and others may do better."""
    known = info.environment == "slurm" and not info.emulated and set(unfit) <= set(info.hosts)
    return known and others_may_do_better(unfit, info.nodes)


def others_may_do_better(unfit: Mapping[str, str], nodes: int) -> bool:
    """Whether so few of the nodes are unfit that it lies on them, not on the cluster or the run."""
    return 2 * len(unfit) <= nodes or nodes == 1


def suspects(events: Iterable[Mapping[str, Any]], attempt: int, names: Sequence[str]) -> set[int]:
    """Return the nodes that failed in one pair only, with one that a spare has replaced since."""
    before: set[str] = set()
    for event in events:
        if event.get("event") == "preflight" and event.get("attempt") == attempt:
            counts = Counter(name for pair in event.get("pairs", []) for name in pair)
            alone = (pair for pair in event.get("pairs", []) if all(counts[name] == 1 for name in pair))
            before.update(name for pair in alone for name in pair)
    return {node for node, name in enumerate(names) if name in before}


def blame(failed: Mapping[Pair, str], names: Sequence[str], suspected: Collection[int] = ()) -> list[Finding]:
    """Return the nodes to which the pairs that failed come down; `suspected` are those of `suspects`."""
    nodes = pairs.to_blame(failed, suspected)
    hint = "Have its network looked at: interface, cable, firewall."
    blames = NODE if 2 * len(nodes) <= len(names) else RUN
    return [
        Finding(
            check="pairs",
            node=names[node],
            text=pairs.describe(node, failed, names, suspected),
            hint=hint,
            blames=blames,
        )
        for node in nodes
    ]


def judge_clocks(names: Sequence[str], stamps: Sequence[float], after: float, before: float) -> list[Finding]:
    """Say whose clock is off, from stamps that were all made between two moments of rank 0's clock.

    Only what is certain counts: a stamp between the two says nothing, and a machine that is slow warns of
    nothing.
    """
    ahead = [min(0.0, stamp - after) + max(0.0, stamp - before) for stamp in stamps]
    usual = sorted(ahead)[(len(ahead) - 1) // 2]
    found = []
    for name, value in zip(names, ahead, strict=True):
        if (off := abs(value - usual)) > SKEW_WARNED_S:
            text = f"its clock is {off:.1f} s {'ahead of' if value > usual else 'behind'} most others."
            hint = (
                "Have its time service (chrony, ntpd) looked at; stops before the time limit need the clock."
            )
            blames = NODE if off > SKEW_REFUSED_S else NOBODY
            found.append(Finding(check="clocks", node=name, text=text, hint=hint, blames=blames))
    return found
