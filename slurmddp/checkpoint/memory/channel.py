"""Messages between a rank and the process that stores its checkpoints: small JSON values and descriptors.

A Unix socket preserves message boundaries and passes descriptors. So memory that a rank has created stays
with the receiver when the rank dies.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from slurmddp.environments.names import CHANNEL_VARIABLE

MAX_MESSAGE_BYTES = 128 * 1024
_MAX_DESCRIPTORS = 16


class WriterChannel:
    """One end of the channel; `pair` makes both."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[WriterChannel, WriterChannel]:
        """Return the two ends of a new channel; an exec closes them unless it names them in pass_fds."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(left), cls(right)

    @classmethod
    def attach(cls, environ: Mapping[str, str]) -> WriterChannel | None:
        """Return a duplicate of the rank's end of the channel to its agent; None without an agent.

        The processes that a rank has started see the variable, but not the channel.
        """
        try:
            end = socket.fromfd(int(environ.get(CHANNEL_VARIABLE, "")), socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (ValueError, OSError):
            return None

        # A program may have closed the channel and opened something else with the same number.
        with suppress(OSError):
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_SEQPACKET:
                return cls(end)
        end.close()
        return None

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message; raises OSError if the other end is closed or the message is too long."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise OSError(
                f"A message has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} bytes are sent at once."
            )
        socket.send_fds(self._end, [data], list(descriptors))

    def receive(self, timeout_s: float | None = 0.0) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors, or None if no message came within `timeout_s` seconds.

        With `timeout_s` None it waits without a limit. Raises EOFError if the other end is closed.
        """
        self._end.settimeout(timeout_s)
        try:
            data, descriptors = self._receive()
        except (BlockingIOError, TimeoutError):
            return None

        # The kernel reports the end of the stream as a message without bytes.
        if not data:
            for descriptor in descriptors:
                os.close(descriptor)
            raise EOFError
        return dict(json.loads(data)), descriptors

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        except ConnectionResetError:
            # The other end closed with unread messages; the kernel reports that before its last messages.
            data, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        return data, list(descriptors)

    def is_closed_by_peer(self) -> bool:
        """Return whether all copies of the other end are closed; its messages may still be unread."""
        poll = select.poll()
        poll.register(self._end, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def close(self) -> None:
        self._end.close()
