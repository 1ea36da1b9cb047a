"""Link the agents of an attempt: send messages, and report which agents have joined or are lost.

The links form a star. The agent of node 0, the hub, listens. The other agents, the members, connect to it.
Both sides prove that they know the attempt's secret. Everything happens inside `handle`, which never waits:
the agent's loop waits. An agent that ends without a farewell is lost at once. An agent that stays silent
while this process is awake is lost after a while. A new connection bridges a shorter fault of the network,
without a lost or repeated message.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

from slurmddp.environments.names import SECRET_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError
from slurmddp.launchers.link.connection import Clock, Message
from slurmddp.launchers.link.hub import Hub
from slurmddp.launchers.link.member import Member

__all__ = ["Clock", "Link", "Message", "open_link"]


class Link(Protocol):
    """An agent's end of the link.

    The link itself adds the messages {"kind": "Joined", "host": ...} and {"kind": "Lost", "why": ...}: the
    hub gets them about each member, a member about the hub. A lost agent stays lost. An agent that says
    farewell is not lost. The loss of a silent agent also has `together`: how many agents fell silent
    together, or 0 if another agent still sends.
    """

    def descriptors(self) -> list[int]:
        """Return the descriptors to wait on, for reading, until `next_deadline`."""
        ...

    def handle(self) -> list[tuple[int, Message]]:
        """Read and write without waiting; return the messages that have come, each with its sender."""
        ...

    def send(self, to: int, message: Message) -> None:
        """Send a message to a node rank: from the hub to any other node, from a member to the hub.

        An agent that has not joined yet gets the message when it joins. An agent that is lost or has left
        gets nothing.

        Raises:
            ValueError: the message is longer than a megabyte, or `to` is another node.
        """
        ...

    def next_deadline(self) -> float:
        """Return the time of `time.monotonic()` at which to call `handle` at the latest."""
        ...

    def missing(self) -> list[int]:
        """Return the node ranks that have never joined; on a member [0] while it has no connection."""
        ...

    def close(self, farewell: bool = True) -> None:
        """Leave the link. Without a farewell nothing is sent: a forked child closes only its copies."""
        ...


class Alone:
    """The link of a job with one node: there is no other agent."""

    def descriptors(self) -> list[int]:
        return []

    def handle(self) -> list[tuple[int, Message]]:
        return []

    def send(self, to: int, message: Message) -> None:
        raise ValueError(f"There is no node {to} to send to: the job has one node.")

    def next_deadline(self) -> float:
        return math.inf

    def missing(self) -> list[int]:
        return []

    def close(self, farewell: bool = True) -> None:
        pass


def open_link(
    info: RankInfo,
    secret: str,
    *,
    heartbeat_s: float = 1.0,
    lost_after_s: float = 10.0,
    clock: Clock = time.monotonic,
) -> Link:
    """Return this agent's end of the link; `handle` connects it.

    Args:
        info: this node; `node_rank` 0 becomes the hub.
        secret: the attempt's secret.
        heartbeat_s: seconds between two heartbeats.
        lost_after_s: seconds without a frame after which an agent is lost.
        clock: the clock, in seconds of `time.monotonic`.

    Raises:
        MismatchError: node 0's name can't be right (see `find_rank_zero`).
        ConfigError: there is no secret.
        SlurmddpError: the hub finds no port to listen on.
    """
    if info.nodes == 1:
        return Alone()

    if not secret:
        raise ConfigError(
            f"{info.nodes} nodes, and no secret by which their agents authenticate each other.",
            hint=f"The batch script draws one for every attempt and exports it as {SECRET_VARIABLE}.",
        )

    kind = Hub if info.node_rank == 0 else Member
    return kind(info, secret, heartbeat_s=heartbeat_s, lost_after_s=lost_after_s, clock=clock)
