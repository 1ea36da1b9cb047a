"""Any other node's end of the line between agents: it looks for the hub, proves itself, and answers.

Until it has found the hub it walks the candidate ports again and again. When the hub falls silent it tries a
second connection beside the first, since a route that is back may be used at once by a new connection while
the old one waits for its next retransmission.
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
from slurmddp.launchers.link.session import ALL, Awake, Clock, Join, Message, Session, copied
from slurmddp.launchers.link.wire import CLOSED, Secret, Wire
from slurmddp.runs.folder.run_context import RunContext

Place = tuple[Address, int]

_ANSWER_S = (1.0, 5.0)
"""How long a listener may take to answer: at first, and at most in later rounds."""
_PAUSE_S = (0.02, 0.5)
_PUBLISHED_S = 3.0
"""After this many seconds without the hub, a port that it may have left in the attempt's folder is tried."""
_FAREWELL_S = 0.5
_SILENT_SHARE = 0.3
"""After this part of the time in which the hub counts as lost a second connection is tried."""


@dataclass
class _Attempt:
    """A connection to what may be the hub."""

    wire: Wire
    place: Place
    until: float
    greeting: str = ""
    """The listener's nonce, once it has said one."""
    nonce: str = ""


class Member:
    """A `Link` (see `control`)."""

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
        self._wire: Wire | None = None
        self._arrived = self._gone = False
        self._heard = 0.0

    def descriptors(self) -> list[int]:
        return [] if self._poll.closed else [self._poll.fileno()]

    def handle(self) -> list[tuple[int, Message]]:
        came: list[Message] = []
        now = self._awake.look()
        if self._attempt and not self._gone:
            self._go_on(self._attempt, came, now)
        if self._wire and not self._gone:
            self._read_hub(self._wire, came, now)
        if self._arrived and not self._gone and now - self._heard > self._lost_after_s:
            self._lose(came, f"no heartbeat for {now - self._heard:.0f} s", together=1)
        if not self._gone:
            self._seek(came, now)
        return [(0, message) for message in came]

    def send(self, to: int, message: Message) -> None:
        if to != 0:
            raise ValueError(f"Node {self._node} may tell node 0 only, not {'all' if to == ALL else to}.")
        message = copied(message)
        if self._gone:
            return
        frame = self._session.numbered(message)
        if self._wire:
            self._wire.put(frame)

    def next_look(self) -> float:
        now = self._awake.now
        at = now + self._heartbeat_s
        if self._attempt:
            at = min(at, self._attempt.until)
        elif self._wanted(now):
            at = min(at, self._next_walk)
        return self._awake.moment(at)

    def missing(self) -> list[int]:
        return [] if self._wire else [0]

    def close(self, farewell: bool = True) -> None:
        if self._wire and farewell:
            self._wire.put(["farewell"])
            self._wire.finish(time.monotonic() + _FAREWELL_S)
        elif self._wire:
            self._wire.forget()
        if self._attempt:
            self._attempt.wire.forget()
        self._wire = self._attempt = None
        self._gone = True
        self._poll.close()

    def _begin_walk(self) -> None:
        self._walk: Iterator[Place] = iter(self._places)
        self._answer_s, self._pause_s, self._next_walk = _ANSWER_S[0], _PAUSE_S[0], 0.0

    def _wanted(self, now: float) -> bool:
        """Whether a connection, or a second one, is to be tried."""
        return self._wire is None or now - self._heard > _SILENT_SHARE * self._lost_after_s

    def _seek(self, came: list[Message], now: float) -> None:
        """Try the next places until one keeps us waiting for its answer."""
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
        """Return where else the hub may listen; the disk is asked only if the hub is long in coming."""
        if self._arrived or self._awake.now < _PUBLISHED_S:
            return []
        return list(product(self._addresses, RunContext.read(os.environ).published_ports(self._looks_for)))

    def _connect(self, place: Place, now: float) -> None:
        address, port = place
        end = socket.socket(address.family, socket.SOCK_STREAM)
        end.setblocking(False)
        # The listener speaks first, so that there is something to read once the connection stands.
        if end.connect_ex((address.text, port)) in (0, errno.EINPROGRESS):
            self._attempt = _Attempt(Wire(end, self._poll), place, now + self._answer_s)
        else:
            end.close()

    def _give_up(self, attempt: _Attempt) -> None:
        attempt.wire.close()
        self._attempt = None

    def _go_on(self, attempt: _Attempt, came: list[Message], now: float) -> None:
        """Take the next steps of the proof as far as the other side has answered."""
        attempt.wire.read()
        while self._attempt and (said := attempt.wire.next()) is not None:
            if not attempt.greeting:
                self._introduce(attempt, said)
            else:
                self._enter(attempt, said, came, now)
        if self._attempt and attempt.wire.ended:
            self._give_up(attempt)
            if self._arrived and self._wire is None and attempt.wire.ended == CLOSED:
                self._lose(came, "connection closed")

    def _introduce(self, attempt: _Attempt, said: object) -> None:
        match said:
            case {"slurmddp": 1, "nonce": str(greeting)} if greeting:
                attempt.greeting, attempt.nonce = greeting, secrets.token_hex(16)
                join = Join(
                    self._node, socket.gethostname(), self._identity, self._session.received, attempt.nonce
                )
                proof = self._secret.proof("member", greeting, *join)
                attempt.wire.put({"said": join, "proof": proof})
            case _:
                self._give_up(attempt)

    def _enter(self, attempt: _Attempt, said: object, came: list[Message], now: float) -> None:
        """Take this connection as ours if the listener proves that it is our hub."""
        nonces = attempt.greeting, attempt.nonce
        match said:
            case {"said": [int(received), str(host)] as words, "proof": proof} if self._secret.proves(
                proof, "hub", *nonces, *words
            ):
                pass
            case _:
                self._give_up(attempt)
                return
        attempt.wire.secure(
            self._secret.frame_key("from member", *nonces), self._secret.frame_key("from hub", *nonces)
        )
        if self._wire:
            self._wire.close()
        self._wire, self._attempt, self._heard = attempt.wire, None, now
        self._places = [attempt.place]  # The hub stays where it is.
        self._begin_walk()
        if not self._arrived:
            self._arrived = True
            came.append({"kind": "arrived", "host": host})
        self._session.confirm(received)
        for frame in self._session.unconfirmed():
            self._wire.put(frame)

    def _read_hub(self, wire: Wire, came: list[Message], now: float) -> None:
        wire.read()
        while (frame := wire.next()) is not None:
            self._heard = now
            match frame:
                case ["message", number, message]:
                    if self._session.is_new(number):
                        came.append(message)
                case ["beat", received]:
                    self._session.confirm(received)
                    wire.put(["echo", self._session.received])
                case ["farewell"]:
                    self._part()
                    return
        if wire.ended == CLOSED and self._attempt is None:
            self._lose(came, "connection closed")
        elif wire.ended:
            # Closed while another connection is on its way: the hub may have taken that one instead.
            wire.close()
            self._wire = None

    def _lose(self, came: list[Message], why: str, **facts: int) -> None:
        came.append({"kind": "lost", "why": why, **facts})
        self._part()

    def _part(self) -> None:
        for wire in (self._wire, self._attempt and self._attempt.wire):
            if wire:
                wire.close()
        self._wire = self._attempt = None
        self._gone = True
