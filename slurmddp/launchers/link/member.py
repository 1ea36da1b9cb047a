"""Implement a member's end of the link: find the hub, prove the secret, and answer heartbeats.

Until a member has found the hub it tries the candidate ports again and again. When the hub falls silent, the
member tries a second connection beside the first: after a fault of the network a new connection works at
once, while the old connection waits for its next retransmission.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.address import Address, find_rank_zero
from slurmddp.host.ports import candidate_ports
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

Endpoint = tuple[Address, int]

_ANSWER_S = (1.0, 5.0)
"""Seconds for a listener to answer: the limit of the first round, and the largest limit of later rounds."""
_PAUSE_S = (0.02, 0.5)
"""The first and the longest pause in seconds between two rounds over all endpoints."""
_PUBLISHED_S = 3.0
"""Seconds without the hub until the member tries the port in the attempt's folder."""
_FAREWELL_S = 0.5
"""Seconds for the farewell to leave this machine."""
_SILENT_SHARE = 0.3
"""The part of `lost_after_s` after which the member tries a second connection."""


@dataclass
class _Attempt:
    """A connection to a process that may be the hub."""

    connection: Connection
    endpoint: Endpoint
    until: float
    """When the member gives this connection up, in seconds of `Awake`."""
    greeting: str = ""
    """The listener's nonce, once it has come."""
    nonce: str = ""
    """The member's nonce."""


class Member:
    """The link of an agent of another node than node 0 (see `Link`)."""

    def __init__(
        self, info: RankInfo, secret: str, *, heartbeat_s: float, lost_after_s: float, clock: Clock
    ) -> None:
        self._node = info.node_rank
        self._secret = Secret(secret, info.launch_id)
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._awake = Awake(clock, 2 * heartbeat_s)
        self._identity = secrets.token_hex(16)
        self._session = Session()
        self._poll = select.epoll()

        self._listener_name = f"control of {info.launch_id}"
        """The name from which the candidate ports of the hub follow."""
        self._addresses = find_rank_zero(info)
        self._endpoints: list[Endpoint] = list(product(self._addresses, candidate_ports(self._listener_name)))
        self._begin_walk()

        self._attempt: _Attempt | None = None
        self._connection: Connection | None = None
        self._joined = False
        self._gone = False
        self._heard = 0.0
        """When the last frame came from the hub, in seconds of `Awake`."""
        self._next_echo = 0.0
        """When to send a silent hub the next frame, in seconds of `Awake`."""

    def descriptors(self) -> list[int]:
        return [] if self._poll.closed else [self._poll.fileno()]

    def handle(self) -> list[tuple[int, Message]]:
        messages: list[Message] = []
        now = self._awake.update()
        if self._attempt and not self._gone:
            self._go_on(self._attempt, messages, now)
        if self._connection and not self._gone:
            self._read_hub(self._connection, messages, now)

        # This check comes after the read, so that the hub does not count as silent while its frames wait.
        if self._joined and not self._gone and self._is_hub_lost(now):
            self._lose(messages, f"no heartbeat for {now - self._heard:.0f} s", together=1)

        if not self._gone:
            self._seek(messages, now)

        return [(0, message) for message in messages]

    def send(self, to: int, message: Message) -> None:
        if to != 0:
            raise ValueError(f"Node {self._node} may send to node 0 only, not to node {to}.")
        if self._gone:
            return

        # Without a connection, the session keeps the frame for the next connection.
        frame = self._session.numbered(message)
        if self._connection:
            self._connection.put(frame)

    def next_deadline(self) -> float:
        now = self._awake.now
        deadline = now + self._heartbeat_s
        if self._attempt:
            deadline = min(deadline, self._attempt.until)
        elif self._needs_connection(now):
            deadline = min(deadline, self._next_walk)

        return self._awake.moment(deadline)

    def missing(self) -> list[int]:
        return [] if self._connection else [0]

    def close(self, farewell: bool = True) -> None:
        if self._connection and farewell:
            self._connection.put(["farewell"])
            self._connection.finish(time.monotonic() + _FAREWELL_S)
        elif self._connection:
            self._connection.forget()

        if self._attempt:
            self._attempt.connection.forget()

        self._connection = self._attempt = None
        self._gone = True
        self._poll.close()

    def _is_hub_lost(self, now: float) -> bool:
        """Decide whether a silent hub is lost; later if its host's kernel still acknowledges bytes."""
        silent_s = now - self._heard
        # A silent hub sends nothing to answer, so send it frames that its kernel acknowledges.
        if self._connection and silent_s > 2 * self._heartbeat_s and now >= self._next_echo:
            self._next_echo = now + self._heartbeat_s
            self._connection.put(["echo", self._session.received])

        if silent_s <= self._lost_after_s:
            return False

        is_blocked = self._connection is not None and self._connection.is_acknowledged(self._lost_after_s / 2)
        return silent_s > BLOCKED_S or not is_blocked

    def _begin_walk(self) -> None:
        """Start the search for the hub anew, with the first endpoint and the shortest times."""
        self._walk: Iterator[Endpoint] = iter(self._endpoints)
        self._answer_s = _ANSWER_S[0]
        self._pause_s = _PAUSE_S[0]
        self._next_walk = 0.0

    def _needs_connection(self, now: float) -> bool:
        """Return whether to connect: there is no connection, or the hub was silent on it for long.

        The limit is `_SILENT_SHARE` of `lost_after_s`.
        """
        return self._connection is None or now - self._heard > _SILENT_SHARE * self._lost_after_s

    def _seek(self, messages: list[Message], now: float) -> None:
        """If a connection is needed, try the next endpoints until one accepts; its answer is then awaited."""
        if self._attempt and now > self._attempt.until:
            self._give_up(self._attempt)

        while self._attempt is None and self._needs_connection(now) and now >= self._next_walk:
            endpoint = next(self._walk, None)
            # All endpoints were tried. The hub may start much later, so wait longer after each round.
            if endpoint is None:
                self._walk = iter([*self._published(), *self._endpoints])
                self._next_walk = now + self._pause_s
                self._pause_s = min(1.5 * self._pause_s, _PAUSE_S[1])
                self._answer_s = min(1.5 * self._answer_s, _ANSWER_S[1])
            else:
                self._connect(endpoint, now)

    def _published(self) -> list[Endpoint]:
        """Return the endpoints that the hub has published in the run folder.

        The result is empty once the member has joined, and in its first `_PUBLISHED_S` seconds.
        """
        if self._joined or self._awake.now < _PUBLISHED_S:
            return []

        ports = RunContext.read(os.environ).published_ports(self._listener_name)
        return list(product(self._addresses, ports))

    def _connect(self, endpoint: Endpoint, now: float) -> None:
        address, port = endpoint
        end = socket.socket(address.family, socket.SOCK_STREAM)
        end.setblocking(False)
        # Don't wait for the connection: the hub sends first, so the socket becomes readable after it.
        if end.connect_ex((address.text, port)) in (0, errno.EINPROGRESS):
            self._attempt = _Attempt(Connection(end, self._poll), endpoint, now + self._answer_s)
        else:
            end.close()

    def _give_up(self, attempt: _Attempt) -> None:
        attempt.connection.close()
        self._attempt = None

    def _go_on(self, attempt: _Attempt, messages: list[Message], now: float) -> None:
        """Continue the mutual authentication as far as the listener has answered."""
        attempt.connection.read()
        while self._attempt and (value := attempt.connection.next()) is not None:
            if not attempt.greeting:
                self._introduce(attempt, value)
            else:
                self._enter(attempt, value, messages, now)

        if self._attempt and attempt.connection.ended:
            self._give_up(attempt)
            # No other connection is left, and this one was closed, not cut: the hub has ended.
            if self._joined and self._connection is None and attempt.connection.ended == CLOSED:
                self._lose(messages, "connection closed")

    def _introduce(self, attempt: _Attempt, value: object) -> None:
        """Answer the listener's nonce with a `Join` and its HMAC; end the attempt after another greeting."""
        match value:
            case {"slurmddp": 1, "nonce": str(greeting)} if greeting:
                attempt.greeting = greeting
                attempt.nonce = secrets.token_hex(16)
                join = Join(
                    self._node, socket.gethostname(), self._identity, self._session.received, attempt.nonce
                )
                proof = self._secret.proof("member", greeting, *join)
                attempt.connection.put({"said": join, "proof": proof})
            case _:
                self._give_up(attempt)

    def _enter(self, attempt: _Attempt, value: object, messages: list[Message], now: float) -> None:
        """Use this connection if the listener's frame `value` proves that it is the hub of this attempt."""
        nonces = (attempt.greeting, attempt.nonce)
        welcome = self._proved(value, nonces)
        if welcome is None:
            self._give_up(attempt)
            return

        received, host = welcome
        attempt.connection.secure(
            self._secret.frame_key("from member", *nonces), self._secret.frame_key("from hub", *nonces)
        )
        if self._connection:
            self._connection.close()

        self._connection = attempt.connection
        self._attempt = None
        self._heard = now

        # A later connection needs only this endpoint, because the hub keeps it until its process ends.
        self._endpoints = [attempt.endpoint]
        self._begin_walk()
        if not self._joined:
            self._joined = True
            messages.append({"kind": "Joined", "host": host})

        self._session.confirm(received)
        # A first frame shows the hub that this connection is used.
        self._connection.put(["echo", self._session.received])
        for frame in self._session.unconfirmed():
            self._connection.put(frame)

    def _proved(self, value: object, nonces: tuple[str, str]) -> tuple[int, str] | None:
        """Check the HMAC of the hub's welcome.

        Returns:
            The number of the last message that the hub has received, and the hub's host. None if the HMAC is
            wrong.
        """
        match value:
            case {"said": [int(received), str(host)], "proof": proof}:
                if self._secret.proves(proof, "hub", *nonces, received, host):
                    return received, host
        return None

    def _read_hub(self, connection: Connection, messages: list[Message], now: float) -> None:
        connection.read()
        while (frame := connection.next()) is not None:
            self._heard = now
            match frame:
                case ["message", number, message]:
                    if self._session.is_new(number):
                        messages.append(message)
                case ["beat", received]:
                    self._session.confirm(received)
                    connection.put(["echo", self._session.received])
                case ["farewell"]:
                    self._part()
                    return

        if connection.ended == CLOSED and self._attempt is None:
            self._lose(messages, "connection closed")
        elif connection.ended:
            # This is no loss yet: the network failed, or the hub has closed this connection because it has
            # accepted the new one, whose welcome is on its way.
            connection.close()
            self._connection = None

    def _lose(self, messages: list[Message], reason: str, **facts: int) -> None:
        messages.append({"kind": "Lost", "why": reason, **facts})
        self._part()

    def _part(self) -> None:
        if self._connection:
            self._connection.close()
        if self._attempt:
            self._attempt.connection.close()

        self._connection = None
        self._attempt = None
        self._gone = True
