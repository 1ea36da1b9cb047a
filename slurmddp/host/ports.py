"""Ports that are derived from the id of a launch, so that its processes find each other.

All processes derive the same list of ports. The listener takes the first free port of the list. A client
tries the ports in order and asks each listener for a proof. The client thereby skips other services, and
listeners of other jobs and earlier attempts.
"""

from __future__ import annotations

import errno
import hashlib
import socket
from collections.abc import Callable

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import SlurmddpError
from slurmddp.host.address import Address, find_rank_zero, not_here

FIRST_PORT = 15000
PORTS = 15000
CANDIDATES = 32
"""Number of ports in the list; all are below the ephemeral ports of Linux (32768 and up)."""


def candidate_ports(identity: str) -> list[int]:
    """Return `CANDIDATES` ports that are derived from `identity`, in the order in which to try them.

    Args:
        identity: the id of the launch, with the purpose of the port.
    """
    ports: list[int] = []
    number = 0
    while len(ports) < CANDIDATES:
        digest = hashlib.sha256(f"port {number} of {identity}".encode()).digest()
        port = FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS
        if port not in ports:
            ports.append(port)
        number += 1
    return ports


def listen(
    address: Address, ports: list[int], publish: Callable[[int], bool] = lambda port: False
) -> socket.socket:
    """Return a socket that listens on the first free port of `ports`, on this address only.

    Args:
        address: a local address.
        ports: the ports to try, in order.
        publish: called with a port that the kernel has chosen because all `ports` are taken. It writes the
            port to where the clients find it, and returns whether it could.

    Raises:
        SlurmddpError: all ports are taken, and `publish` returned False.
    """
    for port in ports:
        try:
            return _open(address, port)
        except OSError as error:
            # The next port is tried if this one is taken, or denied by a security module of the kernel
            # (EACCES).
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise

    listener = _open(address, 0)
    if publish(listener.getsockname()[1]):
        return listener
    listener.close()
    raise SlurmddpError(
        f"Rank 0 tried {len(ports)} ports on {address.text}, {ports[0]} first, and none is free.",
        hint="A program on this node holds thousands of ports (`ss -ltnp` shows it): exclude the node.",
    )


def _open(address: Address, port: int) -> socket.socket:
    return socket.create_server((address.text, port), family=address.family, backlog=1024)


def listen_as_rank_zero(
    info: RankInfo, ports: list[int], publish: Callable[[int], bool] = lambda port: False
) -> socket.socket:
    """Return a socket that listens (see `listen`) on the first address of rank 0 that is local.

    Raises:
        MismatchError: no address of rank 0 belongs to this machine.
    """
    addresses = find_rank_zero(info)
    for address in addresses:
        try:
            return listen(address, ports, publish)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise

    raise not_here(info, addresses)


def free_address(info: RankInfo, purpose: str) -> tuple[str, int]:
    """Return an address of rank 0 and a port that is free on it now, for a rank that will listen there.

    Args:
        info: the ranks.
        purpose: the purpose of the port, which is part of the `identity` in `candidate_ports`.
    """
    with listen_as_rank_zero(info, candidate_ports(f"{info.launch_id} {purpose}")) as probe:
        address, port = probe.getsockname()[:2]
        return address, port
