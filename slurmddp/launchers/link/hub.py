"""Implement node 0's end of the link: accept agents that prove the secret, and report lost agents."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
import time
from dataclasses import dataclass, field
from functools import partial

from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.ports import candidate_ports, listen_as_rank_zero
from slurmddp.launchers.link.connection import (
    BLOCKED_S,
    CLOSED,
    Awake,
    Clock,
    Connection,
    Join,
    Message,
    Secret,
    Session,
)
from slurmddp.runs.folder.run_context import RunContext

_log = logging.getLogger(__name__)

_CALLER_S = 5.0
"""Seconds for a caller to prove the secret."""
_ACCEPTS = 256
"""The largest number of connections that are accepted in a row."""
_FAREWELL_S = 0.5
"""Seconds for all farewells to leave this machine."""


@dataclass
class _Caller:
    """A process that has connected to the hub but has not proved yet that it knows the secret."""

    connection: Connection
    nonce: str
    since: float


@dataclass
class _Peer:
    """The hub's record of a member: not joined yet (no `identity`), present, or `gone` for good."""

    session: Session = field(default_factory=Session)
    identity: str = ""
    host: str = ""
    connection: Connection | None = None
    heard: float = 0.0
    """When the last frame came, in seconds of `Awake`."""
    gone: bool = False
    silent: bool = False
    """Whether the member is gone because it sent no heartbeat."""
    uses_connection: bool = False
    """Whether a frame has come over this connection; until then the member may have dropped it."""

    @property
    def is_present(self) -> bool:
        return bool(self.identity) and not self.gone


class Hub:
    """The link of node 0's agent (see `Link`)."""

    def __init__(
        self, info: RankInfo, secret: str, *, heartbeat_s: float, lost_after_s: float, clock: Clock
    ) -> None:
        self._secret = Secret(secret, info.launch_id)
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._awake = Awake(clock, 2 * heartbeat_s)
        self._next_beat = clock()
        self._peers = {node: _Peer() for node in range(1, info.nodes)}
        self._callers: dict[int, _Caller] = {}
        self._max_callers = 4 * info.nodes + 32
        self._nodes_by_connection: dict[int, int] = {}
        self._refused: set[str] = set()
        self._listener = _listen(info)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)

    def descriptors(self) -> list[int]:
        return [] if self._poll.closed else [self._poll.fileno()]

    def handle(self) -> list[tuple[int, Message]]:
        if self._poll.closed:
            return []

        now = self._awake.update()
        messages: list[tuple[int, Message]] = []
        # Read what has come first, so that no member counts as silent whose messages wait to be read.
        for descriptor, _ in self._poll.poll(0):
            if descriptor == self._listener.fileno():
                self._accept(now)
            elif descriptor in self._callers:
                messages += self._read_caller(descriptor, now)
            elif descriptor in self._nodes_by_connection:
                messages += self._read_member(self._nodes_by_connection[descriptor], now)

        return messages + self._look_after(now)

    def send(self, to: int, message: Message) -> None:
        if to not in self._peers:
            raise ValueError(f"There is no node {to}: the other nodes are 1 to {len(self._peers)}.")

        peer = self._peers[to]
        if peer.gone:
            return

        # Without a connection, the session keeps the frame for the next connection.
        frame = peer.session.numbered(message)
        if peer.connection:
            peer.connection.put(frame)

    def next_deadline(self) -> float:
        return self._next_beat

    def missing(self) -> list[int]:
        return [node for node, peer in self._peers.items() if not peer.identity]

    def close(self, farewell: bool = True) -> None:
        # All farewells share one deadline, so that the time does not grow with the number of members.
        deadline = time.monotonic() + _FAREWELL_S
        for peer in self._peers.values():
            if peer.connection and farewell:
                peer.connection.put(["farewell"])
                peer.connection.finish(deadline)
            elif peer.connection:
                peer.connection.forget()

            peer.connection = None
            peer.gone = True

        for caller in self._callers.values():
            caller.connection.forget()

        self._callers.clear()
        self._nodes_by_connection.clear()
        self._listener.close()
        self._poll.close()

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS):
            try:
                end, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Without free descriptors, drop a caller: callers must not use up the descriptors that the
                # agent needs.
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._drop_oldest_caller()
                # If no caller can be dropped, don't watch the listener until the next heartbeat: epoll would
                # report the waiting connection again and again.
                if not self._callers:
                    self._poll.modify(self._listener, 0)
                return

            end.setblocking(False)
            if len(self._callers) >= self._max_callers:
                self._drop_oldest_caller()

            caller = _Caller(Connection(end, self._poll), secrets.token_hex(16), now)
            self._callers[caller.connection.fileno()] = caller
            caller.connection.put({"slurmddp": 1, "nonce": caller.nonce})

    def _drop_oldest_caller(self) -> None:
        for descriptor in list(self._callers)[:1]:
            self._drop_caller(descriptor)

    def _drop_caller(self, descriptor: int) -> None:
        self._callers.pop(descriptor).connection.close()

    def _read_caller(self, descriptor: int, now: float) -> list[tuple[int, Message]]:
        caller = self._callers[descriptor]
        caller.connection.read()
        value = caller.connection.next()
        if value is None and not caller.connection.ended:
            return []

        join = self._proved(value, caller.nonce)
        if join is None or not self._may_join(self._peers[join.node], join):
            self._drop_caller(descriptor)
            return []

        del self._callers[descriptor]
        return self._welcome(caller, join, now)

    def _proved(self, value: object, nonce: str) -> Join | None:
        """Return the `Join` that a caller has sent if its HMAC proves the secret, else None."""
        match value:
            case {"said": [int(), str(), str(), int(), str()] as facts, "proof": proof}:
                if self._secret.proves(proof, "member", nonce, *facts) and facts[0] in self._peers:
                    return Join(*facts)
        return None

    def _may_join(self, peer: _Peer, join: Join) -> bool:
        """Return whether an agent may join: as a new or a known member, or to replace a lost member."""
        if peer.identity == join.identity:
            return not peer.gone

        # A refused agent tries again and again, so the warning is logged once for each agent.
        if peer.is_present and join.identity not in self._refused:
            self._refused.add(join.identity)
            _log.warning(
                "the agent of node %d has joined already, from %s; a second agent for this node, on %s, is "
                "refused",
                join.node,
                peer.host,
                join.host,
            )

        return not peer.is_present

    def _welcome(self, caller: _Caller, join: Join, now: float) -> list[tuple[int, Message]]:
        """Use the caller's connection for its member from now on.

        Returns:
            A `Joined` message for a new member, and the messages that the member has sent already.
        """
        messages: list[tuple[int, Message]] = []
        peer = self._peers[join.node]
        # An agent that replaces a lost member gets a new session, because its messages count from 1.
        if peer.gone:
            peer = self._peers[join.node] = _Peer()

        if not peer.identity:
            messages.append((join.node, {"kind": "Joined", "host": join.host}))

        # A member that connects again no longer uses its old connection.
        self._drop_connection(peer)
        peer.identity = join.identity
        peer.host = join.host
        peer.heard = now
        peer.connection = caller.connection
        peer.uses_connection = False
        self._nodes_by_connection[caller.connection.fileno()] = join.node

        welcome = [peer.session.received, socket.gethostname()]
        proof = self._secret.proof("hub", caller.nonce, join.nonce, *welcome)
        caller.connection.put({"said": welcome, "proof": proof})
        caller.connection.secure(
            self._secret.frame_key("from hub", caller.nonce, join.nonce),
            self._secret.frame_key("from member", caller.nonce, join.nonce),
        )

        peer.session.confirm(join.received)
        for frame in peer.session.unconfirmed():
            caller.connection.put(frame)

        # The first messages of the member may have come together with its proof.
        return messages + self._read_member(join.node, now)

    def _read_member(self, node: int, now: float) -> list[tuple[int, Message]]:
        messages: list[tuple[int, Message]] = []
        peer = self._peers[node]
        connection = peer.connection
        if connection is None:
            return messages

        connection.read()
        while (frame := connection.next()) is not None:
            peer.heard = now
            peer.uses_connection = True
            match frame:
                case ["message", number, message]:
                    if peer.session.is_new(number):
                        messages.append((node, message))
                case ["echo", received]:
                    peer.session.confirm(received)
                case ["farewell"]:
                    self._part(peer)
                    return messages

        # A closed connection means that the member has ended. But a member that never sent anything by this
        # connection may have closed it only to use another.
        if connection.ended == CLOSED and peer.uses_connection:
            messages.append((node, self._lose(peer, "connection closed")))
        elif connection.ended:
            # The member may connect again. If it does not, it will count as silent.
            self._drop_connection(peer)

        return messages

    def _look_after(self, now: float) -> list[tuple[int, Message]]:
        """Send the heartbeats that are due, and drop callers that have not proved the secret in time.

        Returns:
            A `Lost` message for each member that was silent for too long.
        """
        for descriptor, caller in list(self._callers.items()):
            if now - caller.since > _CALLER_S:
                self._drop_caller(descriptor)

        if self._clock() >= self._next_beat:
            self._next_beat = self._clock() + self._heartbeat_s
            # Watch the listener again: `_accept` may have stopped that for lack of descriptors.
            self._poll.modify(self._listener, select.EPOLLIN)
            for peer in self._peers.values():
                if peer.connection:
                    peer.connection.put(["beat", peer.session.received])

        silent = [
            (node, peer) for node, peer in self._peers.items() if peer.is_present and self._is_lost(peer, now)
        ]
        return [(node, self._lose_silent(peer, now)) for node, peer in silent]

    def _is_lost(self, peer: _Peer, now: float) -> bool:
        """Decide whether a silent member is lost; later if its host's kernel still acknowledges bytes."""
        silent_s = now - peer.heard
        if silent_s <= self._lost_after_s:
            return False

        is_blocked = peer.connection is not None and peer.connection.is_acknowledged(self._lost_after_s / 2)
        return silent_s > BLOCKED_S or not is_blocked

    def _lose_silent(self, peer: _Peer, now: float) -> Message:
        peer.silent = True
        lost = self._lose(peer, f"no heartbeat for {now - peer.heard:.0f} s")
        return lost | {"together": self._fell_silent_with(peer)}

    def _fell_silent_with(self, peer: _Peer) -> int:
        """Return how many members fell silent at about the same time as `peer`, which is included.

        The result is 0 if another member was heard more than `lost_after_s / 2` later, and so is still
        connected.
        """
        peers = [other for other in self._peers.values() if other.is_present or other.silent]
        later_s = [other.heard - peer.heard for other in peers]

        tolerance_s = self._lost_after_s / 2
        if max(later_s) > tolerance_s:
            return 0
        return sum(seconds >= -tolerance_s for seconds in later_s)

    def _lose(self, peer: _Peer, reason: str) -> Message:
        self._part(peer)
        return {"kind": "Lost", "why": reason}

    def _part(self, peer: _Peer) -> None:
        self._drop_connection(peer)
        peer.gone = True

    def _drop_connection(self, peer: _Peer) -> None:
        if peer.connection:
            self._nodes_by_connection.pop(peer.connection.fileno(), None)
            peer.connection.close()
            peer.connection = None


def _listen(info: RankInfo) -> socket.socket:
    """Return a socket that listens on the first free candidate port.

    The port is published in the run folder, if need be, for members that don't find it by themselves.
    """
    identity = f"control of {info.launch_id}"
    publish = partial(RunContext.read(os.environ).publish_port, identity)
    listener = listen_as_rank_zero(info, candidate_ports(identity), publish)
    listener.setblocking(False)
    return listener
