"""The TCP sockets of this machine (of this network namespace), as /proc/net lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"


@dataclass(frozen=True)
class TcpSocket:
    """One line of the kernel's table; closed connections stay in it for a minute (TIME_WAIT)."""

    ports: frozenset[int]
    """The local and the remote port; 0 is the remote port of a socket that listens."""
    listens: bool
    inode: str
    """The number by which a process names it, `socket:[INODE]`; "0" once no process has it."""


def tcp_sockets() -> list[TcpSocket]:
    """Return the TCP sockets of all users; raises OSError if the kernel doesn't list them."""
    tables = [_TABLES[0].read_text(encoding="ascii")]
    with suppress(FileNotFoundError):  # a kernel without IPv6
        tables.append(_TABLES[1].read_text(encoding="ascii"))
    return [socket for table in tables for socket in parse(table)]


def parse(table: str) -> Iterator[TcpSocket]:
    """Yield the sockets of a table such as /proc/net/tcp (proc(5))."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        ports = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
        yield TcpSocket(frozenset(ports), listens=fields[3] == _LISTEN, inode=fields[9])


def inodes_of(pids: Iterable[int]) -> set[str]:
    """Return the inodes of the sockets that processes have open; nothing for a process that has ended."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    kind, _, inode = str(descriptor.readlink()).partition(":")
                    if kind == "socket":
                        inodes.add(inode.strip("[]"))
    return inodes
