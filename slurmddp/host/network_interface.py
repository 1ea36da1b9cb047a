"""Choose the network interface for gloo, and check interfaces that a person named.

By default gloo resolves the name of this machine, on many systems to 127.0.1.1, and then waits on loopback
for peers on other nodes. The right interface is the one by which the kernel reaches rank 0. NCCL probes the
fabric itself.
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


def check_named(environ: Mapping[str, str], backend: str | None, nodes: int, here: Collection[str]) -> None:
    """Raise MismatchError if the environment names interfaces that can't be used.

    gloo would fail without naming the interface. NCCL would wait for ranks on other nodes for minutes.

    Args:
        environ: may hold GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
        backend: of the process group, or None.
        nodes: how many nodes the ranks are on.
        here: the interfaces of this machine.
    """
    gloo = [name.strip() for name in environ.get(GLOO_VARIABLE, "").split(",") if name.strip()]
    if missing := [name for name in gloo if name not in here]:
        raise _unusable(GLOO_VARIABLE, environ, f"there is no {missing[0]}", here)
    if nodes > 1 and _LOOPBACK in gloo:
        raise _unusable(GLOO_VARIABLE, environ, f"loopback leads to no other of the {nodes} nodes", here)
    asked = environ.get(_NCCL_VARIABLE, "") if "nccl" in (backend or "") else ""
    chosen = nccl_choice(asked, here)
    if asked and not chosen:
        raise _unusable(_NCCL_VARIABLE, environ, "it fits no interface", here)
    if asked and nodes > 1 and set(chosen) == {_LOOPBACK}:
        raise _unusable(_NCCL_VARIABLE, environ, f"loopback leads to no other of the {nodes} nodes", here)


def nccl_choice(asked: str, here: Collection[str]) -> list[str]:
    """Return the interfaces that NCCL uses for `eth,ib` (prefixes), `=eth0` (equal), `^docker` (excluded)."""
    exclude, exact = asked.startswith("^"), asked.lstrip("^").startswith("=")
    names = [name for name in asked.lstrip("^").removeprefix("=").split(",") if name]

    def fits(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return sorted(interface for interface in here if fits(interface) != exclude)


def _unusable(variable: str, environ: Mapping[str, str], why: str, here: Collection[str]) -> MismatchError:
    return MismatchError(
        f"{variable}={environ[variable]!r} can't be used on {socket.gethostname()}: {why}.",
        hint=f"Interfaces here are {', '.join(sorted(here))}. Unset {variable} to let slurmddp choose.",
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
        probe.connect((address, 9))  # Chooses the local address; sends nothing.
        return str(probe.getsockname()[0])


def interface_with(address: str) -> str | None:
    """Return the name of the interface that has the local `address`."""
    wanted = ipaddress.ip_address(address)
    addresses = _ipv6_addresses() if wanted.version == 6 else _ipv4_addresses()
    for name, text in addresses:
        if ipaddress.ip_address(text) == wanted:
            return name.partition(":")[0]
    return None


def _ipv4_addresses() -> list[tuple[str, str]]:
    """Return (name, address) of every IPv4 address, secondary addresses included."""
    buffer = array.array("B", bytes(_IFREQ_BYTES * 1024))
    place, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, _SIOCGIFCONF, struct.pack("iL", size, place))
    used = struct.unpack("iL", answer)[0]
    found = []
    for start in range(0, used, _IFREQ_BYTES):
        name = buffer[start : start + _NAME_BYTES].tobytes().split(b"\0", 1)[0].decode()
        packed = buffer[start + _NAME_BYTES + 4 : start + _NAME_BYTES + 8].tobytes()
        found.append((name, socket.inet_ntoa(packed)))
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return []
    rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()]
    return [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows if len(row) == 6]
