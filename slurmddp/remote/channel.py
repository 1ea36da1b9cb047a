"""One connection between the controller and a worker, which prove to each other that they know the secret.

The proof is the link's (`launchers/link/connection.py`): an HMAC over a number that the other side has just
drawn. Each frame then has a text, and an HMAC over the frame's number, sizes and text. The bytes of one
tensor may follow the text. These bytes have no HMAC: they are data, never code.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import struct
from contextlib import suppress
from typing import Any, NamedTuple

import numpy

from slurmddp.launchers.link.connection import Seal, Secret

PURPOSE = "controller"
"""Binds the proofs to connections of this kind."""
_PROOF_S = 10.0
"""Seconds that a caller may take to prove the secret."""
_MAX_STRANGERS_BYTES = 2048
_SIZES = struct.Struct(">QQ")
"""The bytes of a frame's text and of its tensor."""
_MAC_BYTES = 16
NO_DATA = memoryview(b"")
_SILENT_S = 20
"""Seconds without an answer of the other machine after which a connection counts as lost."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * _SILENT_S}


class Greeting(NamedTuple):
    """The facts that a worker sends about itself, with its proof."""

    rank: int
    host: str
    pid: int
    device: str
    """The worker's own GPU, such as `cuda:1`, or `cpu`."""
    nonce: str


class Channel:
    """A connection whose other side has proved the secret; every method may raise OSError or EOFError."""

    def __init__(self, end: socket.socket, sending: bytes, receiving: bytes) -> None:
        self._end = end
        self._sealing, self._opening = Seal(sending), Seal(receiving)

    def send(self, text: str, data: memoryview = NO_DATA) -> None:
        """Send a text, and the bytes of a tensor."""
        if self.has_ended():
            raise EOFError("the other side has closed the connection")
        body = text.encode()
        sizes = _SIZES.pack(len(body), len(data))
        self._end.sendall(sizes + self._sealing.next(sizes + body) + body)
        if data:
            self._end.sendall(data)

    def receive(self) -> tuple[str, memoryview]:
        """Wait for the next frame; return its text, and the bytes of its tensor in new memory."""
        select.select([self._end], [], [])  # Ctrl-C interrupts here, between two frames.
        head = bytes(self._read(_SIZES.size + _MAC_BYTES))
        sizes, mac = head[: _SIZES.size], head[_SIZES.size :]
        text_bytes, data_bytes = _SIZES.unpack(sizes)
        body = self._read(text_bytes)
        if not secrets.compare_digest(mac, self._opening.next(sizes + body)):
            raise ConnectionError("a frame with a wrong HMAC")
        return str(body, "utf-8"), self._read(data_bytes)

    def has_ended(self) -> bool:
        """Return whether the other side has closed the connection or died; does not wait."""
        try:
            return not self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    def close(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, size: int) -> memoryview:
        memory: Any = numpy.empty(size, numpy.uint8)  # A bytearray would be filled with zeros first.
        found = memoryview(memory)
        unread = found
        while len(unread):
            received = self._end.recv_into(unread)
            if not received:
                raise EOFError("the other side has closed the connection")
            unread = unread[received:]
        return found


def admit(end: socket.socket, secret: Secret) -> tuple[Channel, Greeting] | None:
    """Check a caller's proof and send the controller's; after a wrong proof close `end` and return None."""
    nonce = secrets.token_hex(16)
    with suppress(OSError, EOFError, ValueError, TypeError, LookupError, RecursionError):
        _prepare(end)
        _send_line(end, {"slurmddp": 1, "nonce": nonce})
        said, proof = _receive_line(end, "said", "proof")
        if secret.proves(proof, "worker", nonce, *said):
            greeting = Greeting(*said)
            nonces = nonce, greeting.nonce
            _send_line(end, {"proof": secret.proof("controller", *nonces)})
            end.settimeout(None)
            return Channel(end, *_keys(secret, *nonces)), greeting
    end.close()
    return None


def join(end: socket.socket, secret: Secret, **facts: Any) -> Channel:
    """Prove the secret to the controller, however late it asks; return the channel to the controller.

    Raises:
        ConnectionError: the controller has closed the connection, or its proof is wrong.
    """
    nonce = secrets.token_hex(16)
    greeting = Greeting(nonce=nonce, host=socket.gethostname(), **facts)
    select.select([end], [], [])
    _prepare(end)
    (asked,) = _receive_line(end, "nonce")
    _send_line(end, {"said": greeting, "proof": secret.proof("worker", asked, *greeting)})
    (proof,) = _receive_line(end, "proof")
    if not secret.proves(proof, "controller", asked, nonce):
        end.close()
        raise ConnectionError("the controller does not know the secret of this job")
    end.settimeout(None)
    return Channel(end, *reversed(_keys(secret, asked, nonce)))


def _prepare(end: socket.socket) -> None:
    end.settimeout(_PROOF_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _keys(secret: Secret, *nonces: str) -> tuple[bytes, bytes]:
    return secret.frame_key("from controller", *nonces), secret.frame_key("from worker", *nonces)


def _send_line(end: socket.socket, value: Any) -> None:
    end.sendall(json.dumps(value).encode() + b"\n")


def _receive_line(end: socket.socket, *names: str) -> list[Any]:
    """Return the values of `names` in the next line."""
    with end.makefile("rb", buffering=0) as lines:  # No buffer: frames may follow the line.
        line = lines.readline(_MAX_STRANGERS_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError("the other side has sent no whole line")
    found = json.loads(line)
    return [found[name] for name in names]
