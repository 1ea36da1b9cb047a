"""Let the ranks of a launch find the port of rank 0's store, given nothing but the launch's id.

Rank 0 answers on the first free port of a list that follows from the launch's id. A rank sends a token. Rank
0 answers with the port and a token. With the attempt's secret both tokens are HMACs, so no other process
learns the port or can send a wrong port. Without a secret (under srun or mpirun alone) the tokens only keep
launches apart.
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

_PREFIX = b"slurmddp-1 "
_LINE_BYTES = 192
"""The largest length of a message, in bytes."""
_ANSWER_S = 1.0
"""Seconds that a caller has to send its request, and rank 0 to answer."""
_MAX_CALLERS = 256
"""The largest number of callers that are connected at once; a further caller replaces the oldest."""
_POLL_S = 0.002
"""Seconds that one call of `PortServer.answer` waits; rank 0 polls its store between calls."""


@dataclass
class _PortRequest:
    """A connected caller whose request has not arrived completely."""

    since: float
    """When the caller connected, in seconds of `time.monotonic`."""
    received: bytes = b""


@dataclass(frozen=True)
class Handshake:
    """The request for the port of rank 0's store and the response to it, with the tokens of one launch."""

    launch_id: str
    secret: str = field(default_factory=lambda: os.environ.get(SECRET_VARIABLE, ""), repr=False)

    @property
    def ports(self) -> list[int]:
        """The ports at which rank 0 may answer, in order of preference."""
        return candidate_ports(self.launch_id)

    def publish(self, port: int) -> bool:
        """Write into the attempt's folder at which port rank 0 answers; return whether that succeeded."""
        return RunContext.read(os.environ).publish_port(self._published_as, port)

    def published(self) -> list[int]:
        """Return the port that `publish` has written, as a list; empty if there is none."""
        return RunContext.read(os.environ).published_ports(self._published_as)

    @property
    def _published_as(self) -> str:
        return f"ranks of {self.launch_id}"

    def request(self) -> bytes:
        """Return the message with which a rank asks for the port, without a newline."""
        return _PREFIX + self._token("token")

    def response(self, store_port: int) -> bytes:
        """Return rank 0's answer to a rank of its launch, with the port of the store."""
        return _PREFIX + b"%d " % store_port + self._token(f"store on port {store_port}")

    def port_in(self, response: bytes) -> int | None:
        """Return the store's port in `response`; None unless rank 0 of this launch sent it."""
        number = response.removeprefix(_PREFIX).split(b" ")[0]
        if number.isdigit() and hmac.compare_digest(response, self.response(int(number))):
            return int(number)

        return None

    def _token(self, subject: str) -> bytes:
        text = f"{subject} of {self.launch_id}"
        return hmac.digest(self.secret.encode(), text.encode(), "sha256").hex().encode()


class PortServer:
    """Rank 0's server, which sends the port of the store to ranks that ask; a context manager.

    It serves many callers at once, so that a silent caller delays no rank.
    """

    def __init__(self, address: Address, handshake: Handshake) -> None:
        """Listen on the first free port of `handshake.ports`."""
        self._handshake = handshake
        self._callers: dict[socket.socket, _PortRequest] = {}
        self._listener = listen(address, handshake.ports, handshake.publish)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> PortServer:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in list(self._callers):
            self._drop(connection)

        self._selector.close()
        self._listener.close()

    def answer(self, store_port: int) -> None:
        """Serve the callers for `_POLL_S` seconds at most: accept connections, and answer complete requests.

        Ranks of this launch get `store_port`, other programs the word `other`.
        """
        now = time.monotonic()
        for key, _ in self._selector.select(_POLL_S):
            if key.fileobj is self._listener:
                self._accept(now)
            elif isinstance(key.fileobj, socket.socket):
                self._receive(key.fileobj, store_port)

        for connection, caller in list(self._callers.items()):
            if now - caller.since > _ANSWER_S:
                self._drop(connection)

    def _accept(self, now: float) -> None:
        # Limit the loop, so that a stream of callers can't keep rank 0 from polling its store.
        for _ in range(_MAX_CALLERS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # The caller has closed the connection, or this process has no free file descriptor: free one.
                self._drop_oldest()
                return

            connection.setblocking(False)
            if len(self._callers) >= _MAX_CALLERS:
                self._drop_oldest()

            self._callers[connection] = _PortRequest(now)
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket, store_port: int) -> None:
        caller = self._callers[connection]
        try:
            received = connection.recv(_LINE_BYTES - len(caller.received))
            caller.received += received
            if received and not caller.received.endswith(b"\n") and len(caller.received) < _LINE_BYTES:
                return

            response = _PREFIX + b"other"
            if hmac.compare_digest(caller.received.rstrip(b"\n"), self._handshake.request()):
                response = self._handshake.response(store_port)
            connection.send(response + b"\n")
        except OSError:
            # The caller has closed the connection. If it was a rank of this launch, it will ask again.
            pass

        self._drop(connection)

    def _drop_oldest(self) -> None:
        for connection in list(self._callers)[:1]:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._callers[connection]
        self._selector.unregister(connection)
        connection.close()


def ask_for_port(
    address: Address, port: int, handshake: Handshake, timeout_s: float = _ANSWER_S
) -> int | None:
    """Ask at `address` and `port` for the port of rank 0's store.

    Returns:
        The store's port; None unless rank 0 of this launch answers within `timeout_s` seconds.
    """
    try:
        with socket.create_connection((address.text, port), timeout=timeout_s) as connection:
            connection.sendall(handshake.request() + b"\n")
            return handshake.port_in(_read_line(connection, timeout_s))
    except OSError:
        return None


def _read_line(connection: socket.socket, timeout_s: float) -> bytes:
    """Return the next line without its newline; at most `_LINE_BYTES` bytes, within `timeout_s` seconds."""
    line = b""
    deadline = time.monotonic() + timeout_s
    # The time-out of a socket is for one `recv`, so set it to the time that is left before each call.
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(_LINE_BYTES - len(line))
        if not received:
            break

        line += received

    return line.rstrip(b"\n")
