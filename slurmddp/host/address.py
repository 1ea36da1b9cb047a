"""Find the addresses at which the ranks reach rank 0, or raise an error with the reason."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import time
from typing import NamedTuple

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError, SlurmddpError

_RETRY_S = 3.0
"""Seconds for which a look-up is repeated if the name servers report a temporary failure (EAI_AGAIN)."""


class Address(NamedTuple):
    """A resolved address of a host."""

    family: socket.AddressFamily
    text: str


LOOPBACK = Address(socket.AF_INET, "127.0.0.1")


def master_name(info: RankInfo) -> str:
    """Return the name or address by which the ranks reach rank 0: as set by a person, else the first host."""
    return info.master_addr or info.hosts[0]


def is_loopback(name: str) -> bool:
    """Return whether a name is `localhost` or a loopback address, by which each machine means itself."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def find_rank_zero(info: RankInfo) -> list[Address]:
    """Return the addresses of rank 0's host, IPv4 first.

    Raises:
        MismatchError: the name does not resolve, or is loopback although the ranks are on several nodes.
    """
    # Loopback suffices for ranks on one machine, and always works, whatever the name of the machine is.
    if info.master_addr is None and (info.nodes == 1 or info.emulated):
        return [LOOPBACK]

    name = master_name(info)
    addresses = resolve(name)
    # No further check if a person has set a loopback name: they mean it.
    if info.nodes == 1 or is_loopback(name):
        return addresses

    reachable = [address for address in addresses if not is_loopback(address.text)]
    if reachable:
        return reachable
    # If MASTER_PORT is set as well, no error: torchrun listens on this port, on all addresses of its machine.
    if info.master_port is not None:
        return addresses
    raise MismatchError(
        f"The ranks are on {info.nodes} nodes, but on {socket.gethostname()} the name of rank 0's node, "
        f"{name!r}, is {addresses[0].text}: on every node this address means the node itself.",
        hint="Set SLURMDDP_MASTER_ADDR to an address of that node that other nodes can reach (in the cluster "
        "file's setup lines: `export SLURMDDP_MASTER_ADDR=$(hostname -I | cut -d' ' -f1)`), or correct "
        "/etc/hosts.",
    )


def not_here(info: RankInfo, addresses: list[Address]) -> MismatchError:
    """Return the error for a rank 0 that runs on a machine with none of `addresses`."""
    return MismatchError(
        f"Rank 0 runs on {socket.gethostname()}, but {master_name(info)!r} is "
        f"{', '.join(address.text for address in addresses)}, which is not an address of this machine.",
        hint="Set SLURMDDP_MASTER_ADDR to an address of rank 0's node, or correct /etc/hosts or DNS. With "
        "`--distribution=arbitrary` (SLURM_HOSTFILE), and where SLURM 26.05 orders tasks by the topology of "
        "the network, rank 0 need not be on the first node: use `srun --distribution=plane=N` for N tasks on "
        "each node.",
    )


def resolve(name: str) -> list[Address]:
    """Return the addresses of a host, IPv4 first.

    Raises:
        MismatchError: the name is no address, or no name server knows it.
        SlurmddpError: the name servers have not answered.
    """
    # Checked before the look-up: if no name server answers, a wrong address would look like a temporary
    # error.
    if is_malformed_ipv4(name):
        raise MismatchError(
            f"The address of rank 0's node, {name!r}, is not an IPv4 address.",
            hint="An IPv4 address has four numbers up to 255, such as 10.0.0.7.",
        )

    addresses = _look_up(name)
    usable = [address for address in dict.fromkeys(addresses) if _has_sockets(address.family)]
    if not usable:
        raise MismatchError(
            f"The name of rank 0's node, {name!r}, is {', '.join(address.text for address in addresses)}, "
            f"but the kernel of {socket.gethostname()} does not support this kind of address.",
            hint="Set SLURMDDP_MASTER_ADDR to an address of that node that all nodes can use.",
        )
    return sorted(usable, key=lambda address: address.family != socket.AF_INET)


def _look_up(name: str) -> list[Address]:
    """Return the addresses of a name from the name servers; retry temporary failures for `_RETRY_S`."""
    deadline = time.monotonic() + _RETRY_S
    while True:
        try:
            records = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return [Address(family, str(address[0])) for family, _, _, _, address in records]
        except (socket.gaierror, UnicodeError) as error:
            # EAI_AGAIN is a temporary failure of the name servers.
            again = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            if not again or time.monotonic() >= deadline:
                raise _unresolved(name, error, again) from error
        time.sleep(0.5)


def is_malformed_ipv4(name: str) -> bool:
    """Return whether a host looks like an IPv4 address but is not a valid one."""
    if not re.fullmatch(r"[0-9.]+", name):
        return False
    try:
        socket.inet_aton(name)
    except OSError:
        return True
    return False


def _has_sockets(family: socket.AddressFamily) -> bool:
    """Return whether this machine has sockets of `family`."""
    # This must be tested, because a name server may return IPv6 addresses to a kernel without IPv6.
    if family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True


def _unresolved(name: str, error: Exception, temporary: bool) -> SlurmddpError:
    # After a temporary failure, another attempt may succeed. MismatchError would prevent it, SlurmddpError
    # does not.
    kind = SlurmddpError if temporary else MismatchError
    return kind(
        f"The name of rank 0's node, {name!r}, does not resolve on {socket.gethostname()}: {error}.",
        hint="Set SLURMDDP_MASTER_ADDR to an address of that node, or add the name to /etc/hosts or DNS.",
    )
