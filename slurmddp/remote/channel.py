"""Connect the controller and a worker; both prove to each other that they know the secret.

A proof is an HMAC over a random number that the other side has just drawn (`launchers/link/connection.py`). A
frame has a text, and an HMAC over the frame's number, sizes and text. The bytes of one tensor may follow the
text. These bytes have no HMAC: they are data, never code.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
from contextlib import suppress
from typing import Any

import numpy

from slurmddp.launchers.link.connection import Seal, Secret

_PURPOSE = "controller"
"""A text in each proof, so that a proof for another kind of connection is not accepted."""
_MAX_STRANGERS_BYTES = 2048
"""Longest frame, in bytes, before the other side has proved that it knows the secret."""
_SIZES = struct.Struct(">QQ")
"""Header of a frame: the numbers of bytes of its text and of its tensor."""
_MAC_BYTES = 16
NO_DATA = memoryview(b"")
_SILENT_S = 20
"""Seconds without a reply from the other machine after which a connection counts as lost."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * _SILENT_S}


class Channel:
    """A connection between the controller and a worker that sends and receives frames.

    Until `trust` is called, frames are limited to _MAX_STRANGERS_BYTES, and their HMACs have an empty key.
    The methods may raise OSError or EOFError.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._max_bytes = _MAX_STRANGERS_BYTES
        self._sealing = Seal(b"")
        self._opening = Seal(b"")

        # Send at once: commands are short, and the controller may be waiting for a reply.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Probe the connection, because a machine that loses power does not close it.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def trust(self, sending: bytes, receiving: bytes) -> None:
        """Use these keys for the HMACs of all further frames, and lift the size limit and the time-out."""
        self._sealing = Seal(sending)
        self._opening = Seal(receiving)
        self._max_bytes = 1 << 62
        self._end.settimeout(None)

    def send(self, text: str, data: memoryview = NO_DATA) -> None:
        """Send a frame with a text, and with the bytes of a tensor if `data` is given."""
        body = text.encode()
        sizes = _SIZES.pack(len(body), len(data))
        self._end.sendall(sizes + self._sealing.next(sizes + body) + body)
        if data:
            self._end.sendall(data)

    def receive(self) -> tuple[str, memoryview]:
        """Wait for the next frame, and return its text and, in new memory, the bytes of its tensor."""
        header = bytes(self._read(_SIZES.size + _MAC_BYTES))
        sizes = header[: _SIZES.size]
        mac = header[_SIZES.size :]
        text_bytes, data_bytes = _SIZES.unpack(sizes)
        if text_bytes + data_bytes > self._max_bytes:
            raise ConnectionError("a frame that is too long")

        body = self._read(text_bytes)
        if not secrets.compare_digest(mac, self._opening.next(sizes + body)):
            raise ConnectionError("a frame with a wrong HMAC")

        return str(body, "utf-8"), self._read(data_bytes)

    def close(self) -> None:
        # Shut the socket down first, because `close` alone does not end a read in another thread.
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, size: int) -> memoryview:
        # Don't use a bytearray: Python would fill it with zeros first.
        memory: Any = numpy.empty(size, numpy.uint8)
        data = memoryview(memory)

        unread = data
        while len(unread):
            received = self._end.recv_into(unread)
            if not received:
                raise EOFError("the other process has closed the connection")
            unread = unread[received:]

        return data


def meet(end: socket.socket, secret: str, role: str, *facts: Any) -> tuple[Channel, list[Any]]:
    """Authenticate a new connection: both ends prove to each other that they know the secret.

    Each end sends an HMAC over the role, a random number and the facts of both ends, its own first.

    Args:
        end: the connection.
        secret: the secret of the job.
        role: "controller" at one end and "worker" at the other.
        facts: JSON values to send to the other end.

    Returns:
        A channel over the connection, and the facts of the other end.

    Raises:
        ConnectionError: the other end has not proved that it knows the secret. `end` is closed.
    """
    try:
        channel = Channel(end)
        proofs = Secret(secret, _PURPOSE)
        nonce = secrets.token_hex(16)
        greeting = [role, nonce, *facts]
        channel.send(json.dumps(greeting))

        other_greeting = json.loads(channel.receive()[0])
        other_role, other_nonce, *other_facts = other_greeting
        channel.send(proofs.proof(greeting, other_greeting))
        # Refuse the same role, because the other end may have sent back this end's greeting and proof.
        if other_role == role or not proofs.proves(channel.receive()[0], other_greeting, greeting):
            raise ConnectionError("a wrong proof")

        sending = proofs.frame_key(role, nonce, other_nonce)
        receiving = proofs.frame_key(other_role, other_nonce, nonce)
        channel.trust(sending, receiving)
        return channel, other_facts
    except (OSError, EOFError, ValueError, TypeError, RecursionError) as error:
        end.close()
        raise ConnectionError(
            f"the other end of the connection has not proved that it knows the secret: {error}"
        ) from error
