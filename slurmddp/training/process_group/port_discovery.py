"""How ranks that know only their launch's id find the port of rank 0's store: they ask, and are told.

Rank 0 answers on the first free one of the ports that all derive from the launch's id. A rank shows a token
there, and the answer proves itself too: where the attempt has a secret, both follow from it, so nobody else
is told the port, and nobody else can name a rank a wrong one. Without a secret (under srun or mpirun alone)
the launch's id takes its place: it keeps launches apart, not people.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
from dataclasses import dataclass, field

from slurmddp.environments.names import SECRET_VARIABLE
from slurmddp.host.address import Address
from slurmddp.host.ports import candidate_ports, listen
from slurmddp.runs.folder.run_context import RunContext

_HELLO = b"slurmddp-1 "
_LINE_BYTES = 192
_ANSWER_S = 1.0
_MOST_GUESTS = 256
"""Most callers connected at once; a further caller replaces the oldest."""
_LOOK_S = 0.002
"""Rank 0 looks this often for callers, and so whether all have come: it only counts in its own store."""


@dataclass
class _Guest:
    """A caller with an incomplete request: the time of its connection, and the bytes received so far."""

    since: float
    said: bytes = b""


@dataclass(frozen=True)
class Words:
    """What the ranks of one launch say to each other before they have met."""

    launch_id: str
    secret: str = field(default_factory=lambda: os.environ.get(SECRET_VARIABLE, ""), repr=False)

    @property
    def ports(self) -> list[int]:
        """Where to ask, in order."""
        return candidate_ports(self.launch_id)

    def publish(self, port: int) -> bool:
        """Write the port at which rank 0 answers, if `ports` lacks it; return False if that fails."""
        return RunContext.read(os.environ).publish_port(self._published_as, port)

    def published(self) -> list[int]:
        """Return the port that rank 0 has left, if it has."""
        return RunContext.read(os.environ).published_ports(self._published_as)

    @property
    def _published_as(self) -> str:
        return f"ranks of {self.launch_id}"

    def question(self) -> bytes:
        """Return what a rank asks."""
        return _HELLO + self._proof("token")

    def answer(self, store_port: int) -> bytes:
        """Return what rank 0 tells the ranks of its launch."""
        return _HELLO + b"%d " % store_port + self._proof(f"store on port {store_port}")

    def understand(self, answer: bytes) -> int | None:
        """Return the store's port if our rank 0 gave this answer."""
        number = answer.removeprefix(_HELLO).split(b" ")[0]
        if number.isdigit() and hmac.compare_digest(answer, self.answer(int(number))):
            return int(number)
        return None

    def _proof(self, what: str) -> bytes:
        text = f"{what} of {self.launch_id}"
        return hmac.digest(self.secret.encode(), text.encode(), "sha256").hex().encode()


class Beacon:
    """Rank 0's listener: it serves many callers at once, so that a silent caller delays no rank."""

    def __init__(self, address: Address, words: Words) -> None:
        """Listen on the first candidate port that is free."""
        self._words = words
        self._guests: dict[socket.socket, _Guest] = {}
        self._listener = listen(address, words.ports, words.publish)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> Beacon:
        return self

    def __exit__(self, *exception: object) -> None:
        for caller in list(self._guests):
            self._drop(caller)
        self._selector.close()
        self._listener.close()

    def answer(self, store_port: int) -> None:
        """Answer those that have asked: the store's port to our own ranks, `other` to anybody else."""
        now = time.monotonic()
        for key, _ in self._selector.select(_LOOK_S):
            if key.fileobj is self._listener:
                self._accept(now)
            elif isinstance(key.fileobj, socket.socket):
                self._hear(key.fileobj, store_port)
        for caller in [caller for caller, guest in self._guests.items() if now - guest.since > _ANSWER_S]:
            self._drop(caller)

    def _accept(self, now: float) -> None:
        for _ in range(_MOST_GUESTS):
            try:
                caller, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # It went away, or this process has no descriptor left.
                self._drop_oldest()
                return
            caller.setblocking(False)
            if len(self._guests) >= _MOST_GUESTS:
                self._drop_oldest()
            self._guests[caller] = _Guest(now)
            self._selector.register(caller, selectors.EVENT_READ)

    def _hear(self, caller: socket.socket, store_port: int) -> None:
        guest = self._guests[caller]
        try:
            received = caller.recv(_LINE_BYTES - len(guest.said))
            guest.said += received
            if received and not guest.said.endswith(b"\n") and len(guest.said) < _LINE_BYTES:
                return
            ours = hmac.compare_digest(guest.said.rstrip(b"\n"), self._words.question())
            caller.send((self._words.answer(store_port) if ours else _HELLO + b"other") + b"\n")
        except OSError:
            pass  # The caller went away; it asks again if it is one of ours.
        self._drop(caller)

    def _drop_oldest(self) -> None:
        for caller in list(self._guests)[:1]:
            self._drop(caller)

    def _drop(self, caller: socket.socket) -> None:
        del self._guests[caller]
        self._selector.unregister(caller)
        caller.close()


def ask(address: Address, port: int, words: Words, patience_s: float = _ANSWER_S) -> int | None:
    """Return the store's port if our beacon listens here; None for silence and for strangers."""
    try:
        with socket.create_connection((address.text, port), timeout=patience_s) as connection:
            connection.sendall(words.question() + b"\n")
            return words.understand(_read_line(connection, patience_s))
    except OSError:
        return None


def _read_line(connection: socket.socket, patience_s: float) -> bytes:
    """Read up to a newline, within `patience_s`; a peer that speaks another protocol is cut off."""
    line, deadline = b"", time.monotonic() + patience_s
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(_LINE_BYTES - len(line))
        if not received:
            break
        line += received
    return line.rstrip(b"\n")
