"""What agents say to each other, and of each other."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from slurmddp.launchers.link.link import Message
from slurmddp.launchers.link.wire import MAX_MESSAGE_BYTES
from slurmddp.launchers.watchdog.diagnosis import Verdict
from slurmddp.launchers.watchdog.stuck_rank import RankReport, place
from slurmddp.runs.failures.capture import Failure
from slurmddp.runs.failures.causes import LOST_CONTACT, LOST_NODE, UNABLE_NODE, UNFIT_NODE

__all__ = [
    "Message",
    "all_as_facts",
    "as_facts",
    "as_failure",
    "hung_at_exit",
    "lost_agent",
    "lost_node",
    "names_of",
    "stalled_rank",
    "unable_node",
    "unfit_node",
    "why_no_ranks",
]

_LINES_BYTES = MAX_MESSAGE_BYTES // 4
"""A message holds two lists of failures at most, and what else there is to say of each."""


def lost_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node that is gone, as another one sees it."""
    return Failure(
        rank=None,
        node_rank=agent,
        host=hosts[agent],
        exit_code=None,
        signal=None,
        time=round(time.time(), 3),
        reason=f"{LOST_NODE}: {why}",
    )


def lost_agent(agent: int, hosts: Sequence[str], message: Mapping[str, Any], *, here: int) -> Failure:
    """Return the failure that a `lost` message of the link tells of.

    One end of a silent connection can't tell which end was cut off. If all others fell silent together, the
    network of this end is the likely cause.

    Args:
        agent: the agent that was lost.
        message: `why`, and `together` if the agent fell silent (see `Link`).
        here: the agent whose link tells of the loss.
    """
    why, together = str(message.get("why", "")), int(message.get("together", 0))
    if together > 1:
        lost_all = (
            f"it lost all {together} other nodes at once, so its own network is the likely cause ({why})"
        )
        return lost_node(here, hosts, lost_all)
    if together == 1:
        pair = ", ".join(hosts[one] for one in sorted((agent, here)))
        return replace(
            lost_node(agent, hosts, ""), node_rank=None, host=pair, reason=f"{LOST_CONTACT}: {why}"
        )
    return lost_node(agent, hosts, why)


def unfit_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node that the preflight has found unfit, where the others go on without it."""
    return replace(lost_node(agent, hosts, ""), reason=f"{UNFIT_NODE}: {why.removesuffix('.')}")


def unable_node(agent: int, hosts: Sequence[str], found: Failure) -> Failure:
    """Return the failure of a node whose agent has `found` that it can't go on, where the others may."""
    why = (found.reason or found.sentence).removesuffix(".")
    return replace(lost_node(agent, hosts, ""), reason=f"{UNABLE_NODE}: {why}")


def stalled_rank(verdict: Verdict, agents: Sequence[int], ranks_per_node: int) -> Failure:
    """Return the failure of the rank that holds up all others; `agents` run the ranks, in their order."""
    rank = verdict.report.rank
    return Failure(
        rank=rank,
        local_rank=rank % ranks_per_node,
        node_rank=agents[rank // ranks_per_node],
        host=verdict.report.host,
        exit_code=None,
        signal=None,
        time=round(time.time(), 3),
        reason=verdict.reason,
        last_lines=verdict.report.stack,
    )


def hung_at_exit(found: RankReport) -> str:
    """Say that a rank hung at its exit, was ended, and that the result of the others stands."""
    stood = f" It stood at {place(found)} (stacks-rank-{found.rank}.txt)." if found.stack else ""
    return (
        f"rank {found.rank} on {found.host} hung at its exit: all other ranks had left, and for "
        f"{found.seconds:.0f} s it used no CPU and read and wrote nothing. Its agent ended it; the result of "
        f"the other ranks stands.{stood}"
    )


def names_of(agents: Sequence[int], hosts: Sequence[str]) -> str:
    """Return `node 3 (c07), node 4 (c08)`."""
    shown = ", ".join(f"node {agent} ({hosts[agent]})" for agent in agents[:8])
    return shown + (f" and {len(agents) - 8} more" if len(agents) > 8 else "")


def why_no_ranks(agent: int, go: Mapping[str, Any]) -> str:
    """Say why an agent has no place among those that begin."""
    if agent in go["unfit"]:
        return "this node was found unfit: it runs no more ranks in this attempt"
    return "this node waits, to take the place of one that is lost"


def as_facts(found: Failure) -> dict[str, Any]:
    """Return a failure as it goes over the link."""
    return asdict(found)


def all_as_facts(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """Return failures as they go over the link in one message, each with as many last lines as fit."""
    return [as_facts(_within(one, _LINES_BYTES // len(failures))) for one in failures]


def _within(found: Failure, size: int) -> Failure:
    count = len(found.last_lines)
    while count and len(json.dumps(found.last_lines)) > size:
        count //= 2
        found = replace(found, last_lines=found.telling_lines(count))
    return found


def as_failure(facts: Mapping[str, Any]) -> Failure:
    """Return a failure from what came over the link."""
    return Failure(**{**facts, "last_lines": tuple(facts["last_lines"])})
