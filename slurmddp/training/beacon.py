"""How ranks that know only their launch's id find the port of rank 0's store: they ask, and are told.

Rank 0 answers on the first free one of the ports that all derive from the launch's id. A rank shows a token
there, and the answer proves itself too: where the attempt has a secret, both follow from it, so nobody else
is told the port, and nobody else can name a rank a wrong one. Without a secret (under srun or mpirun alone)
the launch's id takes its place: it keeps launches apart, not people.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from dataclasses import dataclass, field

from slurmddp.node.address import Address
from slurmddp.node.ports import SECRET_VARIABLE, candidate_ports, listen

_HELLO = b"slurmddp-1 "
_LINE_BYTES = 192
_ANSWER_S = 1.0
_LOOK_S = 0.002
"""Rank 0 looks this often for callers, and so whether all have come: it only counts in its own store."""


@dataclass(frozen=True)
class Words:
    """What the ranks of one launch say to each other before they have met."""

    launch_id: str
    secret: str = field(default_factory=lambda: os.environ.get(SECRET_VARIABLE, ""), repr=False)

    @property
    def ports(self) -> list[int]:
        """Where to ask, in order."""
        return candidate_ports(self.launch_id)

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


def light(address: Address, words: Words) -> socket.socket:
    """Listen on the first candidate port that is free."""
    beacon = listen(address, words.ports)
    beacon.settimeout(_LOOK_S)
    return beacon


def answer(beacon: socket.socket, words: Words, store_port: int) -> None:
    """Answer one caller, if there is one: the store's port to our own ranks, `other` to anybody else."""
    try:
        caller, _ = beacon.accept()
    except TimeoutError:
        return
    with caller:
        try:
            ours = hmac.compare_digest(_read_line(caller), words.question())
            caller.sendall((words.answer(store_port) if ours else _HELLO + b"other") + b"\n")
        except OSError:
            return  # The caller went away; it asks again if it is one of ours.


def ask(address: Address, port: int, words: Words) -> int | None:
    """Return the store's port if our beacon listens here; None for silence and for strangers."""
    try:
        with socket.create_connection((address.text, port), timeout=_ANSWER_S) as connection:
            connection.sendall(words.question() + b"\n")
            return words.understand(_read_line(connection))
    except OSError:
        return None


def _read_line(connection: socket.socket) -> bytes:
    """Read up to a newline, within _ANSWER_S; a peer that speaks another protocol is cut off."""
    line, deadline = b"", time.monotonic() + _ANSWER_S
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(_LINE_BYTES - len(line))
        if not received:
            break
        line += received
    return line.rstrip(b"\n")
