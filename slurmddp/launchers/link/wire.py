"""One connection between two agents: small JSON values, proved to come from a holder of the secret.

The secret itself never travels. Both sides prove that they know it by an HMAC over a number that the other
has just drawn; from then on each frame carries an HMAC over its place in the order and its content, with a
key of this connection and direction alone. So nobody else is let in, and whoever takes a connection over
later can neither say, repeat nor leave out anything. What is said can be read on the way; it is no secret.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
import time
from typing import Any

MAX_MESSAGE_BYTES = 1 << 20
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 256
_MAX_STRANGERS_FRAME_BYTES = 2048
_SIZE_BYTES = 4
_MAC_BYTES = 16
_READ_BYTES = 1 << 16
_READS = 64
"""At most so many reads in a row, so that no single peer holds the agent up."""

CLOSED = "closed"
"""The other process closed the connection, or ended, or does not speak as agreed."""
CUT = "cut"
"""The network between the two failed; the other process may live on."""


class Secret:
    """What the agents of one attempt know, bound to the launch that they belong to."""

    def __init__(self, secret: str, launch_id: str) -> None:
        self._key = hmac.digest(secret.encode(), f"slurmddp control of {launch_id}".encode(), "sha256")

    def proof(self, *said: object) -> str:
        """Return what only a holder of the secret can say about these JSON values."""
        return hmac.digest(self._key, json.dumps(said).encode(), "sha256").hex()

    def proves(self, shown: object, *said: object) -> bool:
        """Return whether `shown` is the proof of these values."""
        text = shown if isinstance(shown, str) and shown.isascii() else ""
        return hmac.compare_digest(text, self.proof(*said))

    def frame_key(self, direction: str, *nonces: str) -> bytes:
        """Return the key for what goes in one direction of one connection."""
        return bytes.fromhex(self.proof(f"frames {direction}", *nonces))


class _Seal:
    """Makes the HMACs of one direction; the count gives each frame its place in the order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, body: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + body, "sha256")[:_MAC_BYTES]


class Wire:
    """A connection that never waits; `ended` says how it ended (CLOSED, CUT), None while it has not."""

    def __init__(self, end: socket.socket, poll: select.epoll) -> None:
        """Take over `end`, which may still be connecting; `poll` is told what is awaited on it."""
        self.ended: str | None = None
        self._end = end
        self._poll = poll
        self._awaited = select.EPOLLIN
        self._arrived = bytearray()
        self._waiting = bytearray()
        self._sealing: _Seal | None = None
        self._opening: _Seal | None = None
        if end.family in (socket.AF_INET, socket.AF_INET6):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(end, self._awaited)

    def fileno(self) -> int:
        return self._end.fileno()

    def secure(self, sending: bytes, receiving: bytes) -> None:
        """Seal all that is put from now on, and take nothing unsealed any more."""
        self._sealing, self._opening = _Seal(sending), _Seal(receiving)

    def put(self, value: Any) -> None:
        """Send one JSON value, now or as soon as the network takes it."""
        body = json.dumps(value, separators=(",", ":")).encode()
        mac = self._sealing.next(body) if self._sealing else b""
        self._waiting += (len(mac) + len(body)).to_bytes(_SIZE_BYTES, "big") + mac + body
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the network takes it."""
        with contextlib.suppress(OSError):  # An end shows itself, with all that came before it, in `read`.
            while self._waiting:
                del self._waiting[: self._end.send(self._waiting)]
        awaited = select.EPOLLIN | (select.EPOLLOUT if self._waiting else 0)
        if awaited != self._awaited:
            self._poll.modify(self._end, awaited)
            self._awaited = awaited

    def read(self) -> None:
        """Take in what has arrived, for `next` to hand out, and send what still waits."""
        if self._waiting:
            self.flush()
        try:
            for _ in range(_READS):
                received = self._end.recv(_READ_BYTES)
                if not received:
                    self.ended = CLOSED
                    return
                self._arrived += received
        except BlockingIOError:
            return
        except OSError as error:
            self.ended = CLOSED if isinstance(error, ConnectionError) else CUT

    def next(self) -> Any:
        """Return the next value that has arrived whole, or None; one that is not as agreed ends the wire."""
        if len(self._arrived) < _SIZE_BYTES:
            return None
        size = int.from_bytes(self._arrived[:_SIZE_BYTES], "big")
        if size > (_MAX_FRAME_BYTES if self._opening else _MAX_STRANGERS_FRAME_BYTES):
            return self._refuse()
        if len(self._arrived) < _SIZE_BYTES + size:
            return None
        frame = bytes(self._arrived[_SIZE_BYTES : _SIZE_BYTES + size])
        del self._arrived[: _SIZE_BYTES + size]
        return self._opened(frame)

    def _opened(self, frame: bytes) -> Any:
        body = frame
        if self._opening:
            mac, body = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._opening.next(body)):
                return self._refuse()
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return self._refuse()

    def _refuse(self) -> None:
        self._arrived.clear()
        self.ended = CLOSED

    def finish(self, deadline: float) -> None:
        """Send what waits until `deadline` at the latest, then close so that the other side can read it."""
        with contextlib.suppress(OSError):
            while self._waiting:
                self._end.settimeout(max(0.001, deadline - time.monotonic()))
                del self._waiting[: self._end.send(self._waiting)]
            self._end.setblocking(False)
            while self._end.recv(_READ_BYTES):  # Closed with words unread, the kernel would take ours back.
                pass
        self.close()

    def close(self) -> None:
        """Close it here and now; the kernel may still deliver what was put."""
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(self._end)
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # A child of this process may hold a copy.
        self._end.close()

    def forget(self) -> None:
        """Close this process's copy of the connection and leave that of its parent alone."""
        self._end.close()
