"""The line between the agents of an attempt: who is there, who is lost, and what they tell each other.

It is a star. The agent of node 0, the hub, listens; the others, the members, look for it, and both sides
prove that they know the attempt's secret. Everything happens inside `handle`, which never waits: the agent
has one `select` for all that it waits for. An agent that ends without a farewell is lost at once; one that is
silent although this process was awake to hear it is lost after a while. A fault of the network that is
shorter is bridged by a new connection, and nothing that was said is lost or told twice.
"""

from __future__ import annotations

import time
from typing import Protocol

from slurmddp.environments.names import SECRET_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError
from slurmddp.launchers.link.hub import Hub
from slurmddp.launchers.link.member import Member
from slurmddp.launchers.link.session import ALL, Clock, Message, copied

__all__ = ["ALL", "Clock", "Link", "Message", "open_link"]


class Link(Protocol):
    """One agent's end of the line.

    The link itself says {"kind": "arrived", "host": ...} and {"kind": "lost", "why": ...}: the hub hears it
    of each member, a member of the hub. A lost agent stays lost; a farewell is no loss.
    The loss of a silent agent has `together` too: how many agents fell silent together, or 0 if this end
    still heard another agent.
    """

    def descriptors(self) -> list[int]:
        """Return what to wait on, for reading, besides the time that `next_look` names."""
        ...

    def handle(self) -> list[tuple[int, Message]]:
        """Do all that can be done without waiting; return what has come, each with its node rank."""
        ...

    def send(self, to: int, message: Message) -> None:
        """Send to a node rank or, from the hub, to ALL (itself included); members may only tell the hub.

        Who has not arrived yet gets it on arrival; who is lost or has left gets nothing. Raises ValueError
        when the message is too long (a megabyte) or `to` is nobody whom this agent may tell.
        """
        ...

    def next_look(self) -> float:
        """Return the `time.monotonic()` at which `handle` wants to be called at the latest."""
        ...

    def missing(self) -> list[int]:
        """Return the node ranks that have never arrived; on a member [0] while it has no connection."""
        ...

    def close(self, farewell: bool = True) -> None:
        """Leave. Without a farewell nothing is said: so a forked child closes its copies alone."""
        ...


class Alone:
    """The line of an only node, which can talk to itself."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._own: list[tuple[int, Message]] = []

    def descriptors(self) -> list[int]:
        return []

    def handle(self) -> list[tuple[int, Message]]:
        came, self._own = self._own, []
        return came

    def send(self, to: int, message: Message) -> None:
        if to not in (0, ALL):
            raise ValueError(f"There is no node {to}: this one is alone.")
        self._own.append((0, copied(message)))

    def next_look(self) -> float:
        return time.monotonic() + (0.0 if self._own else self._heartbeat_s)

    def missing(self) -> list[int]:
        return []

    def close(self, farewell: bool = True) -> None:
        self._own.clear()


def open_link(
    info: RankInfo,
    secret: str,
    *,
    heartbeat_s: float = 1.0,
    lost_after_s: float = 10.0,
    clock: Clock = time.monotonic,
) -> Link:
    """Return this agent's end of the line; connecting goes on in `handle`.

    Raises MismatchError when node 0's name can't be right (see `find_rank_zero`), ConfigError without a
    secret and SlurmddpError when the hub finds no port to listen on.
    """
    if info.nodes == 1:
        return Alone(heartbeat_s)
    if not secret:
        raise ConfigError(
            f"{info.nodes} nodes, and no secret by which their agents know each other.",
            hint=f"The batch script draws one for every attempt and exports it as {SECRET_VARIABLE}.",
        )
    kind = Hub if info.node_rank == 0 else Member
    return kind(info, secret, heartbeat_s=heartbeat_s, lost_after_s=lost_after_s, clock=clock)
