"""Node 0's end of the line between agents: it lets in who proves the secret, and notes who is lost."""

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
from slurmddp.launchers.link.session import ALL, Awake, Clock, Join, Message, Session, copied
from slurmddp.launchers.link.wire import CLOSED, Secret, Wire
from slurmddp.runs.folder.run_context import RunContext

_log = logging.getLogger(__name__)

_GUEST_S = 5.0
"""How long a connection may take to prove itself."""
_ACCEPTS = 256
_FAREWELL_S = 0.5


@dataclass
class _Guest:
    """A connection that has proved nothing yet."""

    wire: Wire
    nonce: str
    since: float


@dataclass
class _Peer:
    """One member: never arrived (no identity), here, or gone for good."""

    session: Session = field(default_factory=Session)
    identity: str = ""
    host: str = ""
    wire: Wire | None = None
    heard: float = 0.0
    gone: bool = False
    silent: bool = False
    """Whether it is gone because it sent no heartbeat."""

    @property
    def here(self) -> bool:
        return bool(self.identity) and not self.gone


class Hub:
    """A `Link` (see `control`)."""

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
        self._guests: dict[int, _Guest] = {}
        self._most_guests = 4 * info.nodes + 32
        self._nodes_by_wire: dict[int, int] = {}
        self._refused: set[str] = set()
        self._own: list[tuple[int, Message]] = []
        self._listener = _listen(info)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)

    def descriptors(self) -> list[int]:
        return [] if self._poll.closed else [self._poll.fileno()]

    def handle(self) -> list[tuple[int, Message]]:
        if self._poll.closed:
            return []
        now = self._awake.look()
        came, self._own = self._own, []
        # What has queued up is read before anybody is called silent.
        for descriptor, _ in self._poll.poll(0):
            if descriptor == self._listener.fileno():
                self._accept(now)
            elif descriptor in self._guests:
                came += self._read_guest(descriptor, now)
            elif descriptor in self._nodes_by_wire:
                came += self._read_member(self._nodes_by_wire[descriptor], now)
        return came + self._look_after(now)

    def send(self, to: int, message: Message) -> None:
        message = copied(message)
        if to in (0, ALL):
            self._own.append((0, message))
        if to != 0:
            for peer in self._peers.values() if to == ALL else [self._peer(to)]:
                self._tell(peer, message)

    def next_look(self) -> float:
        return self._clock() if self._own else self._next_beat

    def missing(self) -> list[int]:
        return [node for node, peer in self._peers.items() if not peer.identity]

    def close(self, farewell: bool = True) -> None:
        deadline = time.monotonic() + _FAREWELL_S
        for peer in self._peers.values():
            if peer.wire and farewell:
                peer.wire.put(["farewell"])
                peer.wire.finish(deadline)
            elif peer.wire:
                peer.wire.forget()
            peer.wire, peer.gone = None, True
        for guest in self._guests.values():
            guest.wire.forget()
        self._guests.clear()
        self._nodes_by_wire.clear()
        self._listener.close()
        self._poll.close()

    def _peer(self, node: int) -> _Peer:
        if node not in self._peers:
            raise ValueError(f"There is no node {node}: the members are 1 to {len(self._peers)}.")
        return self._peers[node]

    def _tell(self, peer: _Peer, message: Message) -> None:
        if peer.gone:
            return
        frame = peer.session.numbered(message)
        if peer.wire:
            peer.wire.put(frame)

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS):
            try:
                end, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # Strangers must not use up what we may open.
                    self._drop_oldest_guest()
                if not self._guests:  # Who waits to be let in would wake this agent all the time.
                    self._poll.modify(self._listener, 0)
                return
            end.setblocking(False)
            if len(self._guests) >= self._most_guests:
                self._drop_oldest_guest()
            guest = _Guest(Wire(end, self._poll), secrets.token_hex(16), now)
            self._guests[guest.wire.fileno()] = guest
            guest.wire.put({"slurmddp": 1, "nonce": guest.nonce})

    def _drop_oldest_guest(self) -> None:
        for descriptor in list(self._guests)[:1]:
            self._drop_guest(descriptor)

    def _drop_guest(self, descriptor: int) -> None:
        self._guests.pop(descriptor).wire.close()

    def _read_guest(self, descriptor: int, now: float) -> list[tuple[int, Message]]:
        guest = self._guests[descriptor]
        guest.wire.read()
        said = guest.wire.next()
        if said is None and not guest.wire.ended:
            return []
        join = self._proved(said, guest.nonce)
        if join is None or not self._may_come(self._peers[join.node], join):
            self._drop_guest(descriptor)
            return []
        del self._guests[descriptor]
        return self._welcome(guest, join, now)

    def _proved(self, said: object, nonce: str) -> Join | None:
        """Return what a guest says of itself if its proof is right."""
        match said:
            case {"said": [int(), str(), str(), int(), str()] as words, "proof": proof}:
                if self._secret.proves(proof, "member", nonce, *words) and words[0] in self._peers:
                    return Join(*words)
        return None

    def _may_come(self, peer: _Peer, join: Join) -> bool:
        """Whether this agent is the member it says it is, or takes the place of one that is gone."""
        if peer.identity == join.identity:
            return not peer.gone
        if peer.here and join.identity not in self._refused:
            self._refused.add(join.identity)  # It will ask again and again.
            told = join.node, peer.host, join.host
            _log.warning("node %d is here already, on %s; a second one on %s is refused", *told)
        return not peer.here

    def _welcome(self, guest: _Guest, join: Join, now: float) -> list[tuple[int, Message]]:
        """Make the guest's connection that of its member; a new member has arrived."""
        came: list[tuple[int, Message]] = []
        peer = self._peers[join.node]
        if peer.gone:
            peer = self._peers[join.node] = _Peer()
        if not peer.identity:
            came.append((join.node, {"kind": "arrived", "host": join.host}))
        self._drop_wire(peer)
        peer.identity, peer.host, peer.heard, peer.wire = join.identity, join.host, now, guest.wire
        self._nodes_by_wire[guest.wire.fileno()] = join.node
        welcome = [peer.session.received, socket.gethostname()]
        proof = self._secret.proof("hub", guest.nonce, join.nonce, *welcome)
        guest.wire.put({"said": welcome, "proof": proof})
        guest.wire.secure(
            self._secret.frame_key("from hub", guest.nonce, join.nonce),
            self._secret.frame_key("from member", guest.nonce, join.nonce),
        )
        peer.session.confirm(join.received)
        for frame in peer.session.unconfirmed():
            guest.wire.put(frame)
        # Its first words may have come in one piece with its proof.
        return came + self._read_member(join.node, now)

    def _read_member(self, node: int, now: float) -> list[tuple[int, Message]]:
        came: list[tuple[int, Message]] = []
        peer = self._peers[node]
        wire = peer.wire
        if wire is None:
            return came
        wire.read()
        while (frame := wire.next()) is not None:
            peer.heard = now
            match frame:
                case ["message", number, message]:
                    if peer.session.is_new(number):
                        came.append((node, message))
                case ["echo", received]:
                    peer.session.confirm(received)
                case ["farewell"]:
                    self._part(peer)
                    return came
        if wire.ended == CLOSED:
            came.append((node, self._lose(peer, "connection closed")))
        elif wire.ended:
            self._drop_wire(peer)  # It may come again by another connection, until it counts as silent.
        return came

    def _look_after(self, now: float) -> list[tuple[int, Message]]:
        """Ask all for a sign of life when it is time; return who has been silent for too long."""
        for descriptor, guest in list(self._guests.items()):
            if now - guest.since > _GUEST_S:
                self._drop_guest(descriptor)
        if self._clock() >= self._next_beat:
            self._next_beat = self._clock() + self._heartbeat_s
            self._poll.modify(self._listener, select.EPOLLIN)
            for peer in self._peers.values():
                if peer.wire:
                    peer.wire.put(["beat", peer.session.received])
        silent = [
            (node, peer)
            for node, peer in self._peers.items()
            if peer.here and now - peer.heard > self._lost_after_s
        ]
        return [(node, self._lose_silent(peer, now)) for node, peer in silent]

    def _lose_silent(self, peer: _Peer, now: float) -> Message:
        peer.silent = True
        lost = self._lose(peer, f"no heartbeat for {now - peer.heard:.0f} s")
        return lost | {"together": self._fell_silent_with(peer)}

    def _fell_silent_with(self, peer: _Peer) -> int:
        """Return how many peers fell silent together, `peer` included; 0 if another peer spoke later."""
        within = self._lost_after_s / 2
        later = [one.heard - peer.heard for one in self._peers.values() if one.here or one.silent]
        return 0 if max(later) > within else sum(seconds >= -within for seconds in later)

    def _lose(self, peer: _Peer, why: str) -> Message:
        self._part(peer)
        return {"kind": "lost", "why": why}

    def _part(self, peer: _Peer) -> None:
        self._drop_wire(peer)
        peer.gone = True

    def _drop_wire(self, peer: _Peer) -> None:
        if peer.wire:
            self._nodes_by_wire.pop(peer.wire.fileno(), None)
            peer.wire.close()
            peer.wire = None


def _listen(info: RankInfo) -> socket.socket:
    identity = f"control of {info.launch_id}"
    publish = partial(RunContext.read(os.environ).publish_port, identity)
    listener = listen_as_rank_zero(info, candidate_ports(identity), publish)
    listener.setblocking(False)
    return listener
