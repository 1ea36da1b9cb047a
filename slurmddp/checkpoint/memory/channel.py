"""Exchange small JSON messages and file descriptors between a rank and the process that stores its states.

A Unix socket preserves message boundaries and passes descriptors. The receiver of a descriptor keeps the
memory that a rank has created when the rank dies.
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
    """One end of a message channel between two processes: a Unix socket. `pair` creates both ends."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[WriterChannel, WriterChannel]:
        """Create a channel and return both ends. A subprocess inherits an end only if pass_fds names it."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(left), cls(right)

    @classmethod
    def attach(cls, environ: Mapping[str, str]) -> WriterChannel | None:
        """Return a duplicate of the rank's end of the channel, whose descriptor is in CHANNEL_VARIABLE.

        Return None if the variable is missing, or its number is no such channel in this process. That is so
        in the processes that a rank starts: they inherit the variable, but not the channel.
        """
        try:
            end = socket.fromfd(int(environ.get(CHANNEL_VARIABLE, "")), socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (ValueError, OSError):
            return None

        # Check the type: this process may have closed the channel and opened another file with its number.
        with suppress(OSError):
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_SEQPACKET:
                return cls(end)
        end.close()
        return None

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message and file descriptors.

        Raises:
            OSError: the other end is closed, or the message has more than MAX_MESSAGE_BYTES bytes.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise OSError(
                f"The message has {len(data)} bytes, but a message may have at most {MAX_MESSAGE_BYTES}."
            )
        socket.send_fds(self._end, [data], list(descriptors))

    def receive(self, timeout_s: float | None = 0.0) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for the next message, and return it with its descriptors.

        Args:
            timeout_s: the longest wait in seconds. 0: do not wait. None: no limit.

        Returns:
            None if no message came in time.

        Raises:
            EOFError: the other end is closed, and all its messages have been received.
        """
        self._end.settimeout(timeout_s)
        try:
            data, descriptors = self._receive()
        except (BlockingIOError, TimeoutError):
            return None

        # A message without bytes is how the kernel reports that the other end is closed.
        if not data:
            for descriptor in descriptors:
                os.close(descriptor)
            raise EOFError
        return dict(json.loads(data)), descriptors

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        except ConnectionResetError:
            # The other end was closed before it had read all messages. The kernel reports this once, and then
            # delivers the last messages of the other end. So receive again.
            data, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        return data, list(descriptors)

    def is_closed_by_peer(self) -> bool:
        """Return whether all processes have closed the other end. Messages from it may still be unread."""
        poll = select.poll()
        poll.register(self._end, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def close(self) -> None:
        self._end.close()
