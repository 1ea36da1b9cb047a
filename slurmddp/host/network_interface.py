"""Choose the network interface for gloo, and check interfaces that a person named.

By default gloo resolves the name of this machine, on many systems to 127.0.1.1, and then waits on loopback
for peers on other nodes. The right interface is the interface by which the kernel reaches rank 0. NCCL probes
the fabric itself.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

from slurmddp.errors import MismatchError

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
_LOOPBACK = "lo"
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_NAME_BYTES = 16


def check_named(
    environ: Mapping[str, str], backend: str | None, nodes: int, interfaces: Collection[str]
) -> None:
    """Raise MismatchError if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names interfaces that can't be used.

    Args:
        environ: the environment variables.
        backend: the backend of the process group; NCCL's variable is checked only if it contains `nccl`.
        nodes: the number of nodes that the ranks are on.
        interfaces: the names of the interfaces of this machine.
    """
    on_loopback = f"the ranks are on {nodes} nodes, which loopback does not connect"

    # Checked here, because the error of gloo would not name the interface.
    gloo = [name.strip() for name in environ.get(GLOO_VARIABLE, "").split(",") if name.strip()]
    missing = [name for name in gloo if name not in interfaces]
    if missing:
        raise _unusable(GLOO_VARIABLE, environ, f"there is no {missing[0]}", interfaces)
    if nodes > 1 and _LOOPBACK in gloo:
        raise _unusable(GLOO_VARIABLE, environ, on_loopback, interfaces)

    # Checked here, because NCCL would wait for the other nodes for minutes.
    pattern = environ.get(_NCCL_VARIABLE, "")
    if not pattern or "nccl" not in (backend or ""):
        return
    chosen = nccl_choice(pattern, interfaces)
    if not chosen:
        raise _unusable(_NCCL_VARIABLE, environ, "it fits no interface", interfaces)
    if nodes > 1 and set(chosen) == {_LOOPBACK}:
        raise _unusable(_NCCL_VARIABLE, environ, on_loopback, interfaces)


def nccl_choice(pattern: str, interfaces: Collection[str]) -> list[str]:
    """Return the interfaces that NCCL chooses by a value of NCCL_SOCKET_IFNAME.

    `eth,ib` means prefixes, `=eth0` whole names, and `^docker` all interfaces except these.
    """
    excludes = pattern.startswith("^")
    is_exact = pattern.lstrip("^").startswith("=")
    names = [name for name in pattern.lstrip("^").removeprefix("=").split(",") if name]

    def fits(interface: str) -> bool:
        if is_exact:
            return interface in names
        return any(interface.startswith(name) for name in names)

    return sorted(interface for interface in interfaces if fits(interface) != excludes)


def _unusable(
    variable: str, environ: Mapping[str, str], reason: str, interfaces: Collection[str]
) -> MismatchError:
    known = ", ".join(sorted(interfaces))
    return MismatchError(
        f"{variable}={environ[variable]!r} can't be used on {socket.gethostname()}: {reason}.",
        hint=f"The interfaces of this machine are {known}. Unset {variable} to let slurmddp choose.",
    )


def interface_towards(address: str) -> str | None:
    """Return the name of the interface by which this machine reaches `address`; None without a route."""
    try:
        return interface_with(address_towards(address))
    except OSError:
        return None


def address_towards(address: str) -> str:
    """Return the local address from which this machine reaches `address`; raise OSError without a route."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # `connect` on a datagram socket sends nothing; the kernel only chooses the local address.
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def interface_with(address: str) -> str | None:
    """Return the name of the interface that has the local `address`; None if no interface has it."""
    local = ipaddress.ip_address(address)
    addresses = _ipv6_addresses() if local.version == 6 else _ipv4_addresses()
    for name, text in addresses:
        if ipaddress.ip_address(text) == local:
            # The part after a colon is the label of a secondary address, as in `eth0:1`.
            return name.partition(":")[0]
    return None


def _ipv4_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) for every IPv4 address of this machine, including secondary addresses."""
    # SIOCGIFCONF (netdevice(7)) fills an array of structures: the name in 16 bytes, then the socket address.
    # In the socket address, the IPv4 address follows after 4 bytes of family and port.
    buffer = array.array("B", bytes(_IFREQ_BYTES * 1024))
    place, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, _SIOCGIFCONF, struct.pack("iL", size, place))
    used = struct.unpack("iL", answer)[0]

    addresses = []
    for start in range(0, used, _IFREQ_BYTES):
        name = buffer[start : start + _NAME_BYTES].tobytes().split(b"\0", 1)[0].decode()
        packed = buffer[start + _NAME_BYTES + 4 : start + _NAME_BYTES + 8].tobytes()
        addresses.append((name, socket.inet_ntoa(packed)))
    return addresses


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) for every IPv6 address of this machine."""
    table = Path("/proc/net/if_inet6")
    # The file is missing if the kernel lacks IPv6.
    if not table.exists():
        return []

    rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()]
    return [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows if len(row) == 6]
