"""Another node's end of the link: it finds the hub, proves the secret, and answers heartbeats.

Until it has found the hub it tries the candidate ports again and again. When the hub falls silent, it tries a
second connection beside the first: after a fault of the network a new connection works at once, while the old
connection waits for its next retransmission.
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

Place = tuple[Address, int]

_ANSWER_S = (1.0, 5.0)
"""Seconds for a listener to answer: at first, and at most in later rounds."""
_PAUSE_S = (0.02, 0.5)
_PUBLISHED_S = 3.0
"""Seconds without the hub until the member tries the port in the attempt's folder."""
_FAREWELL_S = 0.5
_SILENT_SHARE = 0.3
"""The part of `lost_after_s` until the member tries a second connection."""


@dataclass
class _Attempt:
    """A connection to a listener that may be the hub."""

    connection: Connection
    place: Place
    until: float
    greeting: str = ""
    """The listener's nonce, once it has come."""
    nonce: str = ""


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
        self._looks_for = f"control of {info.launch_id}"
        self._addresses = find_rank_zero(info)
        self._places: list[Place] = list(product(self._addresses, candidate_ports(self._looks_for)))
        self._begin_walk()
        self._attempt: _Attempt | None = None
        self._connection: Connection | None = None
        self._joined = self._gone = False
        self._heard = 0.0

    def descriptors(self) -> list[int]:
        return [] if self._poll.closed else [self._poll.fileno()]

    def handle(self) -> list[tuple[int, Message]]:
        messages: list[Message] = []
        now = self._awake.update()
        if self._attempt and not self._gone:
            self._go_on(self._attempt, messages, now)
        if self._connection and not self._gone:
            self._read_hub(self._connection, messages, now)
        if self._joined and not self._gone and now - self._heard > self._lost_after_s:
            self._lose(messages, f"no heartbeat for {now - self._heard:.0f} s", together=1)
        if not self._gone:
            self._seek(messages, now)
        return [(0, message) for message in messages]

    def send(self, to: int, message: Message) -> None:
        if to != 0:
            raise ValueError(f"Node {self._node} may send to node 0 only, not {to}.")
        if self._gone:
            return
        frame = self._session.numbered(message)
        if self._connection:
            self._connection.put(frame)

    def next_deadline(self) -> float:
        now = self._awake.now
        at = now + self._heartbeat_s
        if self._attempt:
            at = min(at, self._attempt.until)
        elif self._wanted(now):
            at = min(at, self._next_walk)
        return self._awake.moment(at)

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

    def _begin_walk(self) -> None:
        self._walk: Iterator[Place] = iter(self._places)
        self._answer_s, self._pause_s, self._next_walk = _ANSWER_S[0], _PAUSE_S[0], 0.0

    def _wanted(self, now: float) -> bool:
        """Return whether to try a connection, or a second connection."""
        return self._connection is None or now - self._heard > _SILENT_SHARE * self._lost_after_s

    def _seek(self, messages: list[Message], now: float) -> None:
        """Try the next addresses until a listener has to be waited for."""
        if self._attempt and now > self._attempt.until:
            self._give_up(self._attempt)
        while self._attempt is None and self._wanted(now) and now >= self._next_walk:
            place = next(self._walk, None)
            if place is None:
                self._walk = iter([*self._published(), *self._places])
                self._next_walk = now + self._pause_s
                self._pause_s = min(1.5 * self._pause_s, _PAUSE_S[1])
                self._answer_s = min(1.5 * self._answer_s, _ANSWER_S[1])
            else:
                self._connect(place, now)

    def _published(self) -> list[Place]:
        """Return other addresses of the hub; the folder is read only after a while without the hub."""
        if self._joined or self._awake.now < _PUBLISHED_S:
            return []
        return list(product(self._addresses, RunContext.read(os.environ).published_ports(self._looks_for)))

    def _connect(self, place: Place, now: float) -> None:
        address, port = place
        end = socket.socket(address.family, socket.SOCK_STREAM)
        end.setblocking(False)
        # The listener sends first, so the socket is readable once it is connected.
        if end.connect_ex((address.text, port)) in (0, errno.EINPROGRESS):
            self._attempt = _Attempt(Connection(end, self._poll), place, now + self._answer_s)
        else:
            end.close()

    def _give_up(self, attempt: _Attempt) -> None:
        attempt.connection.close()
        self._attempt = None

    def _go_on(self, attempt: _Attempt, messages: list[Message], now: float) -> None:
        """Take the next steps of the proof, as far as the other side has answered."""
        attempt.connection.read()
        while self._attempt and (said := attempt.connection.next()) is not None:
            if not attempt.greeting:
                self._introduce(attempt, said)
            else:
                self._enter(attempt, said, messages, now)
        if self._attempt and attempt.connection.ended:
            self._give_up(attempt)
            if self._joined and self._connection is None and attempt.connection.ended == CLOSED:
                self._lose(messages, "connection closed")

    def _introduce(self, attempt: _Attempt, said: object) -> None:
        match said:
            case {"slurmddp": 1, "nonce": str(greeting)} if greeting:
                attempt.greeting, attempt.nonce = greeting, secrets.token_hex(16)
                join = Join(
                    self._node, socket.gethostname(), self._identity, self._session.received, attempt.nonce
                )
                proof = self._secret.proof("member", greeting, *join)
                attempt.connection.put({"said": join, "proof": proof})
            case _:
                self._give_up(attempt)

    def _enter(self, attempt: _Attempt, said: object, messages: list[Message], now: float) -> None:
        """Use this connection if the listener proves that it is the hub of this attempt."""
        nonces = attempt.greeting, attempt.nonce
        match said:
            case {"said": [int(received), str(host)] as words, "proof": proof} if self._secret.proves(
                proof, "hub", *nonces, *words
            ):
                pass
            case _:
                self._give_up(attempt)
                return
        attempt.connection.secure(
            self._secret.frame_key("from member", *nonces), self._secret.frame_key("from hub", *nonces)
        )
        if self._connection:
            self._connection.close()
        self._connection, self._attempt, self._heard = attempt.connection, None, now
        self._places = [attempt.place]  # The hub stays where it is.
        self._begin_walk()
        if not self._joined:
            self._joined = True
            messages.append({"kind": "Joined", "host": host})
        self._session.confirm(received)
        self._connection.put(["echo", self._session.received])  # The hub learns that this connection is used.
        for frame in self._session.unconfirmed():
            self._connection.put(frame)

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
            # The hub may have taken another connection, which is on its way.
            connection.close()
            self._connection = None

    def _lose(self, messages: list[Message], why: str, **facts: int) -> None:
        messages.append({"kind": "Lost", "why": why, **facts})
        self._part()

    def _part(self) -> None:
        for connection in (self._connection, self._attempt and self._attempt.connection):
            if connection:
                connection.close()
        self._connection = self._attempt = None
        self._gone = True
