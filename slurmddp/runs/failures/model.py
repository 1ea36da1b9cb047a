"""A failure: how a process of a run ended, and the sentences that say so."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_FINISHED,
    EXIT_NO_PROGRESS,
    EXIT_UNHEALTHY_NODE,
)
from slurmddp.runs.failures import causes
from slurmddp.runs.failures.causes import reads_like_a_lost_peer

DELIBERATE_CODES = frozenset({EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNHEALTHY_NODE})
"""Codes with which a rank says why it must not be run again, or not here; they are passed on as they are."""
ENDED_BY_AGENT = "ended by its agent"
"""The reason of a rank that its own agent has ended: another one's end has caused it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One process's bad end; `rank` and `local_rank` are None when the agent itself died or refused."""

    rank: int | None
    local_rank: int | None = None
    node_rank: int | None = None
    host: str
    exit_code: int | None
    signal: str | None
    time: float = 0.0
    last_lines: tuple[str, ...] = ()
    reason: str = ""
    """Why, as one phrase (see `causes`); empty where nothing tells."""
    generation: int = 0
    """Which set of ranks of the attempt it was, counted from the restarts in place."""

    @property
    def sentence(self) -> str:
        """Who, where, how and why, to stand within a line of text."""
        for kind in (causes.LOST_CONTACT, causes.LOST_NODE, causes.STALLED):
            if self.reason.startswith(kind):
                return f"{self.short}{self.reason.removeprefix(kind)}"
        told = self.exit_code is not None or self.signal is not None
        return f"{self.short}: {self.reason}" if self.reason and told else self.short

    @property
    def short(self) -> str:
        """Who, where and how, where the reason stands elsewhere."""
        host = self.host or "an unknown host"
        if self.reason.startswith(causes.LOST_CONTACT):
            return f"nodes {host.replace(', ', ' and ')} lost each other"
        if self.reason.startswith(causes.LOST_NODE):
            return f"node {self.node_rank} ({host}) was lost"
        who = f"rank {self.rank} on {host}"
        if self.rank is None:
            # Before the ranks exist, what fails is the agent that starts them.
            who = f"the agent {'' if self.node_rank is None else f'of node {self.node_rank} '}on {host}"
        if self.reason.startswith(causes.STALLED):
            return f"{who} {causes.STALLED}"
        if self.signal is None and self.exit_code is None:
            return f"{who} {self.reason or 'left no word: it was killed, or its host is gone'}"
        return f"{who} {self._how}"

    @property
    def _how(self) -> str:
        if self.signal == "SIGKILL" and not self.reason:
            return "was killed by SIGKILL (often the kernel's out-of-memory killer)"
        if self.signal:
            return f"was killed by {self.signal}"
        if self.exit_code in DELIBERATE_CODES:
            return f"refused to go on (exit code {self.exit_code})"
        return f"ended with exit code {self.exit_code}"

    @property
    def advice(self) -> str:
        """What a person can do about it; empty where the reason is all there is."""
        return causes.advice(self.reason)

    @property
    def lines_title(self) -> str:
        """What `last_lines` are."""
        return "its stack" if self.reason.startswith(causes.STALLED) else "its last lines"

    def telling_lines(self, count: int) -> tuple[str, ...]:
        """Return those of `last_lines` that say the most; a stack begins with its innermost frame."""
        if self.reason.startswith(causes.STALLED):
            return self.last_lines[:count]
        return causes.telling(self.last_lines, count)


def lost_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node that is gone, as another node sees it."""
    return Failure(
        rank=None,
        node_rank=agent,
        host=hosts[agent],
        exit_code=None,
        signal=None,
        time=round(time.time(), 3),
        reason=f"{causes.LOST_NODE}: {why}",
    )


def lost_agent(agent: int, hosts: Sequence[str], why: str, together: int, *, here: int) -> Failure:
    """Return the failure of an agent whose link to the agent `here` has ended.

    One end of a silent connection can't tell which end was cut off. If all others fell silent together, the
    network of this end is the likely cause.

    Args:
        agent: the agent that was lost.
        hosts: the hosts of all agents.
        why: how the link ended.
        together: how many agents fell silent together; 0 if this end still hears others.
        here: the agent that has lost it.
    """
    if together > 1:
        lost_all = (
            f"it lost all {together} other nodes at once, so its own network is the likely cause ({why})"
        )
        return lost_node(here, hosts, lost_all)
    if together == 1:
        pair = ", ".join(hosts[one] for one in sorted((agent, here)))
        lost = lost_node(agent, hosts, "")
        return replace(lost, node_rank=None, host=pair, reason=f"{causes.LOST_CONTACT}: {why}")
    return lost_node(agent, hosts, why)


def unhealthy_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node that did not pass the preflight, if the others go on without it."""
    return replace(lost_node(agent, hosts, ""), reason=f"{causes.UNFIT_NODE}: {why.removesuffix('.')}")


def unable_node(agent: int, hosts: Sequence[str], found: Failure) -> Failure:
    """Return the failure of a node whose agent can't go on because of `found`, if the others may."""
    why = (found.reason or found.sentence).removesuffix(".")
    return replace(lost_node(agent, hosts, ""), reason=f"{causes.UNABLE_NODE}: {why}")


def from_json(text: str) -> Failure | None:
    """Return the failure in a file's text; None when it is not (yet) a whole one."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return from_facts(found) if isinstance(found, dict) else None


def from_facts(found: Mapping[str, Any]) -> Failure:
    """Return the failure that an event or a record tells of; what it does not tell is not known."""
    known: dict[str, Any] = {"rank": None, "host": "", "exit_code": None, "signal": None}
    known |= {field.name: found[field.name] for field in fields(Failure) if field.name in found}
    known["host"], known["reason"] = str(known["host"] or ""), str(known.get("reason") or "")
    known["last_lines"] = tuple(str(line) for line in known.get("last_lines") or ())
    return Failure(**known)


def is_consequence(failure: Failure) -> bool:
    """Whether another may be the cause: it lost or awaits a peer, or it ended well before the others."""
    if failure.exit_code == EXIT_FINISHED or failure.reason.startswith(causes.STALLED_TOGETHER):
        return True
    if failure.exit_code is None and failure.signal != "SIGABRT":
        return False  # Killed, lost or stalled: what it was saying does not matter.
    if failure.exit_code in DELIBERATE_CODES:
        return False
    if failure.reason:
        return failure.reason.startswith(causes.LOST_PEER)
    return reads_like_a_lost_peer(failure.last_lines)
