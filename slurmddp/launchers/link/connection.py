"""Exchange small JSON values over a connection between two agents, authenticated by the attempt's secret.

The secret itself is never sent. Each side proves that it knows the secret by an HMAC over a number that the
other side has just drawn. From then on each frame carries an HMAC over its number and its content, with a key
for this connection and direction. So a process that takes over a connection can neither add, repeat nor leave
out a frame. The frames are not encrypted.

After a fault of the network a new connection may replace a connection. Messages are numbered and kept until
the other side has confirmed them, so that no message is lost or repeated (`Session`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

MAX_MESSAGE_BYTES = 1 << 20
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 256
_MAX_STRANGERS_FRAME_BYTES = 2048
"""The largest frame of a process that has not proved the secret."""
_SIZE_BYTES = 4
_MAC_BYTES = 16
_READ_BYTES = 1 << 16
_TCP_INFO = struct.Struct("8x13I")
"""The start of `struct tcp_info` in linux/tcp.h; its last number is `tcpi_last_ack_recv`, in milliseconds."""
_READS = 64
"""The largest number of reads in a row, so that no single peer holds up the agent."""

CLOSED = "closed"
"""The other process closed the connection, or ended, or broke the protocol."""
CUT = "cut"
"""The network failed; the other process may still run."""

BLOCKED_S = 150.0
"""Seconds of silence after which an agent is lost although its host's kernel acknowledges bytes.

The limit is long because an agent is silent while a file server of the run folder does not answer.
"""

Message = dict[str, Any]
"""A JSON object; `kind` names the dataclass of the message."""
Frame = list[Any]

Clock = Callable[[], float]
"""Seconds as `time.monotonic` counts them."""


class Secret:
    """Computes and checks HMACs with a key that follows from an attempt's secret and its launch id."""

    def __init__(self, secret: str, launch_id: str) -> None:
        self._key = hmac.digest(secret.encode(), f"slurmddp control of {launch_id}".encode(), "sha256")

    def proof(self, *values: object) -> str:
        """Return the HMAC of these JSON values in hexadecimal digits; it proves knowledge of the secret."""
        return hmac.digest(self._key, json.dumps(values).encode(), "sha256").hex()

    def proves(self, proof: object, *values: object) -> bool:
        """Return whether `proof`, which another process has sent, is the HMAC of these values."""
        # `compare_digest` raises TypeError for anything but ASCII strings.
        if not isinstance(proof, str) or not proof.isascii():
            return False
        return hmac.compare_digest(proof, self.proof(*values))

    def frame_key(self, direction: str, *nonces: str) -> bytes:
        """Return the key for the frames of one direction of the connection with these nonces."""
        return bytes.fromhex(self.proof(f"frames {direction}", *nonces))


class Seal:
    """Computes the HMACs of the frames of one direction; each covers the frame's number and content."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, body: bytes) -> bytes:
        """Return the HMAC of the next frame, whose content is `body`."""
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + body, "sha256")[:_MAC_BYTES]


class Connection:
    """A connection that sends and receives frames without waiting.

    `ended` is CLOSED or CUT once the connection has ended, else None.

    Args:
        end: a non-blocking socket, which may still be connecting; the connection closes it.
        poll: the epoll object with which the connection registers the socket.
    """

    def __init__(self, end: socket.socket, poll: select.epoll) -> None:
        self.ended: str | None = None
        self._end = end
        self._poll = poll
        self._awaited = select.EPOLLIN
        self._read_bytes = bytearray()
        self._unsent = bytearray()
        self._sealing: Seal | None = None
        self._opening: Seal | None = None

        # Switch off Nagle's algorithm, so that each small message is sent at once.
        if end.family in (socket.AF_INET, socket.AF_INET6):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        poll.register(end, self._awaited)

    def fileno(self) -> int:
        return self._end.fileno()

    def secure(self, sending: bytes, receiving: bytes) -> None:
        """Add HMACs to all frames that are sent from now on, and check the HMACs of received frames.

        Args:
            sending: the key for sent frames.
            receiving: the key for received frames.
        """
        self._sealing = Seal(sending)
        self._opening = Seal(receiving)

    def put(self, value: Any) -> None:
        """Send a JSON value as a frame, now or once the socket accepts its bytes."""
        body = json.dumps(value, separators=(",", ":")).encode()
        mac = self._sealing.next(body) if self._sealing else b""
        self._unsent += (len(mac) + len(body)).to_bytes(_SIZE_BYTES, "big") + mac + body
        self.flush()

    def flush(self) -> None:
        """Send as many of the unsent bytes as the socket accepts."""
        # Errors are left to `read`, which first reads the frames that came before the connection ended.
        with contextlib.suppress(OSError):
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]

        awaited = select.EPOLLIN
        if self._unsent:
            awaited |= select.EPOLLOUT
        if awaited != self._awaited:
            self._poll.modify(self._end, awaited)
            self._awaited = awaited

    def read(self) -> None:
        """Read the bytes that have come, so that `next` can return them as values, and send unsent bytes.

        Set `ended` if the connection has ended.
        """
        # epoll also wakes the agent when the socket can take more of the unsent bytes.
        if self._unsent:
            self.flush()

        try:
            for _ in range(_READS):
                received = self._end.recv(_READ_BYTES)
                if not received:
                    self.ended = CLOSED
                    return

                self._read_bytes += received
        except BlockingIOError:
            return
        except ConnectionError:
            self.ended = CLOSED
        except OSError:
            self.ended = CUT

    def next(self) -> Any:
        """Return the value of the next complete frame; None if there is none.

        A frame that breaks the protocol ends the connection.
        """
        if len(self._read_bytes) < _SIZE_BYTES:
            return None

        size = int.from_bytes(self._read_bytes[:_SIZE_BYTES], "big")
        # A process that has not proved the secret must not make the agent use much memory.
        if size > (_MAX_FRAME_BYTES if self._opening else _MAX_STRANGERS_FRAME_BYTES):
            return self._refuse()
        if len(self._read_bytes) < _SIZE_BYTES + size:
            return None

        frame = bytes(self._read_bytes[_SIZE_BYTES : _SIZE_BYTES + size])
        del self._read_bytes[: _SIZE_BYTES + size]
        return self._opened(frame)

    def _opened(self, frame: bytes) -> Any:
        """Return the value of a frame; a wrong HMAC or invalid JSON ends the connection."""
        body = frame
        if self._opening:
            mac = frame[:_MAC_BYTES]
            body = frame[_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._opening.next(body)):
                return self._refuse()

        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return self._refuse()

    def _refuse(self) -> None:
        # Drop the bytes that follow a frame that breaks the protocol, because they can't be trusted.
        self._read_bytes.clear()
        self.ended = CLOSED

    def is_acknowledged(self, within_s: float) -> bool:
        """Return whether the other host's kernel has acknowledged sent bytes within the last seconds.

        A kernel acknowledges bytes even while the process that should read them waits, for example for a file
        server that has stopped. A host that is off the network acknowledges nothing.
        """
        try:
            info = self._end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return False

        milliseconds: int = _TCP_INFO.unpack(info)[-1]
        return milliseconds < 1000 * within_s

    def finish(self, deadline: float) -> None:
        """Send the unsent bytes until `deadline` at most, and close so that the peer still gets them."""
        with contextlib.suppress(OSError):
            while self._unsent:
                self._end.settimeout(max(0.001, deadline - time.monotonic()))
                del self._unsent[: self._end.send(self._unsent)]

            # Read what has come: with unread bytes at the close, the kernel resets the connection, and the
            # peer loses bytes that were sent.
            self._end.setblocking(False)
            while self._end.recv(_READ_BYTES):
                pass

        self.close()

    def close(self) -> None:
        """Close the connection now; the kernel may still deliver bytes that were sent."""
        # The poll object may be closed already.
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(self._end)

        # shutdown ends the connection even if a child of this process holds a copy of the socket.
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

        self._end.close()

    def forget(self) -> None:
        """Close only this process's descriptor; the connection of the parent process stays open."""
        self._end.close()


class Join(NamedTuple):
    """The description of itself that a member sends when it connects, with an HMAC over these values."""

    node: int
    host: str
    identity: str
    """The random number of an agent, by which the hub recognises it after a fault of the network."""
    received: int
    """The number of the last message that the member has received from the hub."""
    nonce: str


class Session:
    """Numbers the messages between two agents over all their connections, and keeps unconfirmed ones."""

    def __init__(self) -> None:
        self.received = 0
        """The number of the last received message."""
        self._sent = 0
        """The number of the last sent message."""
        self._kept: deque[tuple[int, Frame]] = deque()

    def numbered(self, message: Message) -> Frame:
        """Return the frame for a message, and keep it until the other agent confirms it.

        Raises:
            ValueError: the message is too long.
        """
        # Refuse a long message before it gets a number: the other agent would wait for the missing number.
        size = len(json.dumps(message))
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"The message has {size} bytes, more than the {MAX_MESSAGE_BYTES} allowed.")

        self._sent += 1
        frame = ["message", self._sent, message]
        self._kept.append((self._sent, frame))
        return frame

    def is_new(self, number: int) -> bool:
        """Note that message `number` has come; return False if it came before, over another connection."""
        # A new connection repeats all unconfirmed messages in order, so another number is a repetition.
        if number != self.received + 1:
            return False

        self.received = number
        return True

    def confirm(self, number: int) -> None:
        """Drop the kept messages up to `number`, which the other agent has received."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def unconfirmed(self) -> Iterable[Frame]:
        """Return the frames that were not confirmed, to send them again over a new connection."""
        return [frame for _, frame in self._kept]


class Awake:
    """Clock that counts only the seconds in which this process runs.

    While this process is suspended, the clock stands still, so that peers don't count as silent.

    Args:
        clock: the clock that is read at each update.
        longest: the largest number of seconds that an update adds.
    """

    def __init__(self, clock: Clock, longest: float) -> None:
        self.now = 0.0
        """The sum of all updates so far, in seconds."""
        self._clock = clock
        self._longest = longest
        self._updated = clock()

    def update(self) -> float:
        """Add the seconds since the last update, at most `longest`; return the sum of all updates."""
        now = self._clock()
        self.now += min(now - self._updated, self._longest)
        self._updated = now
        return self.now

    def moment(self, when: float) -> float:
        """Return the time of `clock` at which `update` will return `when`."""
        return self._updated + when - self.now
