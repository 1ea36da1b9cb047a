"""Find the resources of a sandbox on this machine: programs, SLURM version, free ports and networks."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import pwd
import re
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmddp.errors import ConfigError, SlurmError
from slurmddp.host.file_lock import try_lock
from slurmddp.sandbox.plan import Machine, Plan, Request, check

HOSTS_FILE = Path("/etc/hosts")
SYSTEM_FOLDERS = (
    *("/usr/sbin", "/usr/local/sbin", "/sbin", "/usr/bin", "/usr/local/bin", "/bin"),
    *("/usr/lib/openssh", "/usr/libexec/openssh", "/usr/lib/ssh"),
)
"""The folders of daemons, and of the SFTP server."""
PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "munged": "munge",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "ip": "iproute2",
    "tc": "iproute2",
    "hostname": "hostname",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "umount": "mount",
    "fusermount3": "fuse3",
    "sshfs": "sshfs",
    "sftp-server": "openssh-sftp-server",
    "glusterfs": "glusterfs-client",
    "glusterfsd": "glusterfs-client",
}
SHARED_PROGRAMS = {
    "nfs": ["fusermount3"],
    "sshfs": ["sshfs", "sftp-server"],
    "glusterfs": ["glusterfs", "glusterfsd"],
}
"""The programs of each file system that nodes can share."""
CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21
FIRST_PORT = 21000
LAST_PORT = 29999
"""The last port to use; the ephemeral ports of Linux begin above it."""


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH with the folders such as /usr/sbin in which Debian installs daemons."""
    return os.pathsep.join((environ.get("PATH", ""), *SYSTEM_FOLDERS))


def find_program(name: str, path: str) -> str:
    """Return the path of a program; raise SlurmError if it is not installed."""
    program = shutil.which(name, path=path)
    if program is None:
        raise SlurmError(f"{name} is not installed.", hint=install_hint([name]))
    return program


def require_programs(request: Request, namespaces: bool, path: str) -> None:
    """Raise SlurmError with the missing packages if the sandbox lacks programs."""
    needed = ["slurmctld", "slurmd", "sinfo", "munged"]
    if request.accounting:
        needed += ["slurmdbd", "mariadbd", "mariadb-install-db"]
    if namespaces:
        needed += ["ip", "hostname", "nsenter", "unshare"]
    if request.link_mbit:
        needed.append("tc")
    if request.shared:
        needed += ["mount", "umount", *SHARED_PROGRAMS[request.shared]]

    missing = [name for name in needed if shutil.which(name, path=path) is None]
    if missing:
        raise SlurmError(
            f"The sandbox runs a real SLURM, and this machine lacks {', '.join(missing)}.",
            hint=install_hint(missing),
        )


def require_fuse(request: Request) -> None:
    """Raise ConfigError if this process can't mount a file system in user space."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise ConfigError(
            f"--shared {request.shared} mounts by FUSE, and this process can't open /dev/fuse.",
            hint="Load the kernel module fuse; start a container with --device /dev/fuse.",
        )

    if request.shared == "nfs" and importlib.util.find_spec("mfusepy") is None:
        raise ConfigError(
            "--shared nfs needs the Python package mfusepy, which is not installed.",
            hint="Install it with: pip install 'slurmddp[sandbox]'",
        )


def install_hint(missing: list[str]) -> str:
    """Return the shell command that installs the Debian packages of missing programs."""
    packages = " ".join(sorted({PACKAGES.get(name, name) for name in missing}))
    return f"As root on Debian or Ubuntu: apt-get install --no-install-recommends {packages}"


def want_namespaces(request: Request) -> bool:
    """Decide whether nodes get network namespaces; raise ConfigError if the request is impossible."""
    wanted = request.namespaces
    if wanted is None:
        wanted = can_make_namespaces()

    if request.link_mbit and not wanted:
        raise ConfigError(
            f"--link-mbit {request.link_mbit} needs network namespaces: without them nodes have no links.",
            hint="Start the sandbox as root and without --no-namespaces, or leave out --link-mbit.",
        )

    if request.shared and not wanted:
        raise ConfigError(
            f"--shared {request.shared} needs namespaces, in which each node has a mount of its own.",
            hint="Start the sandbox as root and without --no-namespaces, or leave out --shared.",
        )

    if request.namespaces and not can_make_namespaces():
        raise ConfigError(
            "Network namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN, which this process lacks.",
            hint="Leave them out with --no-namespaces: all nodes then share this machine's address.",
        )

    return wanted


def can_make_namespaces() -> bool:
    """Return whether this process may create network namespaces and interfaces."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            capabilities = int(line.split()[1], 16)
            needed = (CAP_NET_ADMIN, CAP_SYS_ADMIN)
            return os.geteuid() == 0 and all(capabilities >> bit & 1 for bit in needed)

    return False


def lay_out(request: Request, environ: Mapping[str, str]) -> Plan:
    """Return the plan of `request` on this machine; the caller holds `machine_lock`."""
    check(request)
    path = search_path(environ)
    namespaces = want_namespaces(request)
    require_programs(request, namespaces, path)
    if request.shared:
        require_fuse(request)

    # Nodes that share the address of this machine need different ports.
    port_count = 3 if namespaces else 3 + request.nodes
    ports = free_ports(port_count, request.root)
    machine = Machine(
        host=socket.gethostname().split(".")[0],
        user=pwd.getpwuid(os.geteuid()).pw_name,
        memory_mb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        slurm_version=slurm_version(path),
        subnet=free_subnet(path) if namespaces else 0,
        controller_port=ports[0],
        database_port=ports[1],
        node_ports=() if namespaces else tuple(ports[3:]),
        server_port=ports[2],
    )

    return Plan(request=request, machine=machine, namespaces=namespaces)


def slurm_version(path: str) -> tuple[int, int]:
    """Return the version of the installed SLURM, such as (22, 5)."""
    result = subprocess.run([find_program("slurmd", path), "-V"], capture_output=True, text=True, check=False)
    match = re.search(r"(\d+)\.(\d+)", result.stdout)
    if match is None:
        raise SlurmError(
            f"slurmd -V prints no version, but {(result.stdout + result.stderr).strip()!r}.",
            hint=f"Repair the installation. {install_hint(['slurmd'])}",
        )

    return int(match[1]), int(match[2])


def free_ports(count: int, root: Path) -> list[int]:
    """Return `count` free ports.

    The search starts at a port that depends on `root`. With one start for all sandboxes, a new sandbox would
    take the port of another whose daemon is just restarting.
    """
    candidates = LAST_PORT + 1 - FIRST_PORT
    start = zlib.crc32(str(root).encode()) % candidates
    ports: list[int] = []
    for step in range(candidates):
        if len(ports) == count:
            return ports

        port = FIRST_PORT + (start + step) % candidates
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.append(port)

    raise SlurmError(
        f"Fewer than {count} ports are free from {FIRST_PORT} to {LAST_PORT}.",
        hint="End programs that listen there; `ss -ltnp` lists them.",
    )


def free_subnet(path: str) -> int:
    """Return the number x of a network 10.77.x.0/24 that has no route and no bridge on this machine."""
    program = find_program("ip", path)
    routes = subprocess.run([program, "-4", "route"], capture_output=True, text=True, check=True).stdout
    routed = [ipaddress.ip_network(text) for text in re.findall(r"^(?:\w+ )?(\d+\.[\d./]+)", routes, re.M)]

    for number in range(256):
        subnet = ipaddress.ip_network(f"10.77.{number}.0/24")
        in_use = any(subnet.overlaps(network) for network in routed)
        # A bridge without an address has no route, so the bridges are checked as well.
        if not in_use and not Path(f"/sys/class/net/sddp{number}").exists():
            return number

    raise SlurmError("No network 10.77.x.0/24 is free on this machine.", hint="Try --no-namespaces.")


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """Let one process at a time choose ports and networks, by a lock on /etc/hosts."""
    # Every account can read the file, so the lock also holds between sandboxes of several users.
    with HOSTS_FILE.open("rb") as stream:
        while try_lock(stream) is False:
            time.sleep(0.05)
        yield
