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

    Besides the agents' messages, `handle` returns {"kind": "Joined", "host": ...} when another agent has
    joined, and {"kind": "Lost", "why": ...} when it is lost: on the hub about each member, on a member about
    the hub. A lost agent stays lost. An agent that sends a farewell before it exits is not lost. For an agent
    that fell silent, `Lost` also has `together`: how many agents fell silent together, or 0 if another agent
    still sends.
    """

    def descriptors(self) -> list[int]:
        """Return the descriptors to wait on, until one is readable or `next_deadline` has come."""
        ...

    def handle(self) -> list[tuple[int, Message]]:
        """Read and write without waiting; return the messages that have come, as (node rank, message)."""
        ...

    def send(self, to: int, message: Message) -> None:
        """Send a message to a node rank: from the hub to any other node, from a member to the hub.

        An agent that has not joined yet gets the message when it joins. An agent that is lost or has exited
        gets nothing.

        Raises:
            ValueError: the message is longer than MAX_MESSAGE_BYTES (1 MiB), or `to` is another node.
        """
        ...

    def next_deadline(self) -> float:
        """Return the time of `time.monotonic()` at which to call `handle` at the latest."""
        ...

    def missing(self) -> list[int]:
        """Return the node ranks that have never joined; a member returns [0] while it has no connection."""
        ...

    def close(self, farewell: bool = True) -> None:
        """Leave the link.

        Args:
            farewell: whether to announce this to the other agents. A forked child passes False: it closes
                only its copies of the descriptors.
        """
        ...


class Alone:
    """The link of a job with one node: there is no other agent."""

    def descriptors(self) -> list[int]:
        return []

    def handle(self) -> list[tuple[int, Message]]:
        return []

    def send(self, to: int, message: Message) -> None:
        raise ValueError(f"There is no node {to} to send a message to: the job has one node.")

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
    """Return this agent's end of the link; the first calls of `handle` connect it.

    Args:
        info: this node; `node_rank` 0 becomes the hub.
        secret: the attempt's secret.
        heartbeat_s: seconds between two heartbeats.
        lost_after_s: seconds without a frame after which an agent counts as lost.
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
            f"The agents of {info.nodes} nodes have no secret by which to authenticate each other.",
            hint=f"Each agent needs the variable {SECRET_VARIABLE}, which the batch script draws and exports "
            "for every attempt.",
        )

    kind = Hub if info.node_rank == 0 else Member
    return kind(info, secret, heartbeat_s=heartbeat_s, lost_after_s=lost_after_s, clock=clock)
