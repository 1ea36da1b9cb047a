"""List the TCP sockets of this machine (of its network namespace) from /proc/net."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"


@dataclass(frozen=True)
class TcpSocket:
    """An entry of the kernel's table of TCP sockets; closed connections stay for a minute (TIME_WAIT)."""

    ports: frozenset[int]
    """The local and the remote port; a socket that listens has the remote port 0."""
    listens: bool
    inode: str
    """The number of the socket in /proc/PID/fd, `socket:[INODE]`; "0" once no process has the socket."""


def tcp_sockets() -> list[TcpSocket]:
    """Return the TCP sockets of all accounts on this machine, IPv4 and IPv6.

    Raises:
        OSError: the kernel does not list them.
    """
    tables = [_TABLES[0].read_text(encoding="ascii")]
    # The second file is missing if the kernel lacks IPv6.
    with suppress(FileNotFoundError):
        tables.append(_TABLES[1].read_text(encoding="ascii"))
    return [socket for table in tables for socket in parse(table)]


def parse(table: str) -> Iterator[TcpSocket]:
    """Yield the sockets of a table such as /proc/net/tcp (proc(5))."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        # Fields 1 and 2 are the local and remote address and port in hexadecimal digits: `0100007F:3A98`.
        ports = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
        yield TcpSocket(frozenset(ports), listens=fields[3] == _LISTEN, inode=fields[9])


def inodes_of(pids: Iterable[int]) -> set[str]:
    """Return the inodes of the sockets that the given processes have open; ended processes are ignored."""
    inodes = set()
    for pid in pids:
        # Errors are ignored: a process may end, or close a descriptor, while its descriptors are listed.
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    kind, _, inode = str(descriptor.readlink()).partition(":")
                    if kind == "socket":
                        inodes.add(inode.strip("[]"))
    return inodes
