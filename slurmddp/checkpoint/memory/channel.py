"""Messages between a rank and the process that keeps its checkpoints: small JSON values and open files.

A Unix socket keeps the bounds of messages and passes descriptors on, so memory that a rank has made stays
with the keeper when the rank dies.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from slurmddp.environments.names import CHANNEL_VARIABLE

MAX_MESSAGE_BYTES = 128 * 1024
_MAX_DESCRIPTORS = 16


class Channel:
    """One end of the line; `pair` makes both."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return the two ends of a new line; descriptors are closed on exec unless passed on by name."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    @classmethod
    def attach(cls, environ: Mapping[str, str]) -> Channel | None:
        """Return the rank's end of the line to its agent; None where there is no agent."""
        number = environ.get(CHANNEL_VARIABLE, "")
        if not number.isdecimal() or not _is_line(int(number)):
            return None
        return cls(socket.socket(fileno=int(number)))

    @classmethod
    def attach_copy(cls, environ: Mapping[str, str]) -> Channel | None:
        """Return the same by a descriptor of its own, which may be closed."""
        number = environ.get(CHANNEL_VARIABLE, "")
        try:
            return cls.attach({CHANNEL_VARIABLE: str(os.dup(int(number)))}) if number.isdecimal() else None
        except OSError:
            return None

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message; raises OSError when the other end is gone or the message is too long."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise OSError(f"A message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} go at once.")
        socket.send_fds(self._end, [data], list(descriptors))

    def receive(self, timeout_s: float | None = 0.0) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors, or None when there is none within `timeout_s`.

        None waits for ever. Raises EOFError when the other end is closed.
        """
        self._end.settimeout(timeout_s)
        try:
            data, descriptors = self._receive()
        except (BlockingIOError, TimeoutError):
            return None
        if not data:
            for descriptor in descriptors:
                os.close(descriptor)
            raise EOFError
        return dict(json.loads(data)), descriptors

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        except ConnectionResetError:
            # The other end closed before it had read all; this is told once, ahead of what it sent itself.
            data, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        return data, list(descriptors)

    def is_closed_there(self) -> bool:
        """Tell whether nobody holds the other end any more; what it has sent may still be unread."""
        look = select.poll()
        look.register(self._end, 0)
        return any(event & select.POLLHUP for _, event in look.poll(0))

    def close(self) -> None:
        self._end.close()


def _is_line(descriptor: int) -> bool:
    """Whether this process has inherited the line: the number alone goes further, to programs it starts."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            return (end.family, end.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return False
