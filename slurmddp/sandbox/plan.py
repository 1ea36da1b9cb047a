"""Define the plan of a sandbox as frozen values: names, addresses, ports and paths.

A `Request` holds a user's options. A `Plan` is a request with the ports and networks of one machine. The plan
is written into the state folder before any process starts, so that any later process can remove the sandbox.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.sandbox.nfs_rules import parse_options

RECORD = "sandbox.json"
"""The name of the file with the plan; a folder with this file is a state folder."""
MOST_NODES = 200
SLURMD_PORT = 6818
SHARED = ("nfs", "sshfs", "glusterfs")
LONGEST_ROOT = 66
"""Longest path of a state folder in characters: Linux allows 107 for a unix socket in it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A user's options for a sandbox."""

    name: str
    root: Path
    """The state folder."""
    nodes: int = 2
    cpus: int = 4
    gpus: int = 2
    accounting: bool = False
    namespaces: bool | None = None
    """Whether each node has a network namespace; None: yes if this process is root and may create them."""
    grace_s: int = 10
    slurmd_timeout_s: int = 30
    link_mbit: int = 0
    """Bandwidth of each node's link in Mbit/s, in each direction; 0: as fast as the machine allows."""
    kill_wait_s: int = 10
    """Seconds between SIGTERM and SIGKILL, unless the grace time of a partition applies."""
    shared: str = ""
    """The file system, of `SHARED`, through which nodes see `shared_folder`; empty: the folder itself."""
    shared_folder: Path | None = None
    mount_options: str = ""
    """Further options of the mounts, separated by commas."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of this machine: name, size, versions, free ports and networks."""

    host: str
    user: str
    memory_mb: int
    slurm_version: tuple[int, int]
    subnet: int
    """Third number of the network 10.77.x.0/24, and number of the bridge."""
    controller_port: int
    database_port: int
    node_ports: tuple[int, ...]
    server_port: int = 0
    """The port of the server of a shared file system."""


@dataclass(frozen=True)
class SandboxNode:
    """A node: name, address and slurmd port. With namespaces, the name is also the node's host name."""

    name: str
    address: str
    port: int
    link: str
    """The network interface of this machine that leads to the node."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A request together with the machine's properties; nothing else decides how the sandbox is built."""

    request: Request
    machine: Machine
    namespaces: bool

    @property
    def root(self) -> Path:
        return self.request.root

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.root / "munge.socket"

    @property
    def volume_id(self) -> str:
        """Return the identity of the volume that GlusterFS makes of the shared folder."""
        return str(uuid.uuid5(uuid.NAMESPACE_URL, str(self.root)))

    @property
    def bridge(self) -> str:
        return f"sddp{self.machine.subnet}"

    @property
    def controller_address(self) -> str:
        return f"10.77.{self.machine.subnet}.1" if self.namespaces else "127.0.0.1"

    @property
    def nodes(self) -> tuple[SandboxNode, ...]:
        return tuple(self._node(number) for number in range(1, self.request.nodes + 1))

    def _node(self, number: int) -> SandboxNode:
        name = f"{node_prefix(self.request.name)}{number}"
        if not self.namespaces:
            return SandboxNode(name, "127.0.0.1", self.machine.node_ports[number - 1], "lo")
        address = f"10.77.{self.machine.subnet}.{10 + number}"
        return SandboxNode(name, address, SLURMD_PORT, f"{self.bridge}n{number}")


def node_prefix(name: str) -> str:
    """Return the prefix of node names: `n` for the default sandbox, else `NAME-n`."""
    return "n" if name == "default" else f"{name}-n"


def check(request: Request) -> None:
    """Raise ConfigError for the first value of a request that can't work."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,23}", request.name):
        raise ConfigError(
            f"{request.name!r} is not a valid name for a sandbox.",
            hint="Use up to 24 lower-case letters, digits and '-', beginning with a letter.",
        )

    _check_root(request.root)
    for option, value, low, high in (
        ("nodes", request.nodes, 1, MOST_NODES),
        ("cpus", request.cpus, 1, 1024),
        ("gpus", request.gpus, 0, 64),
        ("grace", request.grace_s, 0, 600),
        ("slurmd-timeout", request.slurmd_timeout_s, 5, 3600),
        ("kill-wait", request.kill_wait_s, 1, 3600),
        ("link-mbit", request.link_mbit, 0, 100_000),
    ):
        if not low <= value <= high:
            raise ConfigError(f"--{option} {value} is out of range.", hint=f"Use {low} to {high}.")

    _check_shared(request)


def _check_shared(request: Request) -> None:
    if not request.shared:
        if request.shared_folder or request.mount_options:
            raise ConfigError(
                "--folder and --mount-options describe a shared file system, and none is requested.",
                hint=f"Add --shared with one of {', '.join(SHARED)}.",
            )
        return

    if request.shared not in SHARED:
        raise ConfigError(f"--shared {request.shared} is unknown.", hint=f"Use one of {', '.join(SHARED)}.")

    folder = request.shared_folder
    if folder is None or not folder.is_absolute() or not folder.is_dir():
        raise ConfigError(f"The folder {str(folder)!r} does not exist.", hint="Name a folder with --folder.")

    if folder.is_relative_to(request.root) or request.root.is_relative_to(folder):
        raise ConfigError(
            f"The nodes can't mount {folder}, because the sandbox keeps its own files in {request.root}.",
            hint="Name another folder with --folder, or another one for the sandbox with --dir.",
        )

    # GlusterFS runs text between backticks in its files as a shell command.
    if request.shared == "glusterfs" and re.search(r"[`\"\\\n]", str(folder)):
        raise ConfigError(
            f"GlusterFS can't serve {str(folder)!r}, because of a character in its path.",
            hint="Name a folder without quotes, backticks, backslashes and line breaks with --folder.",
        )

    if request.shared == "nfs":
        parse_options(request.mount_options)


def _check_root(root: Path) -> None:
    text = str(root)
    if not root.is_absolute() or not re.fullmatch(r"[A-Za-z0-9/._+@-]+", text):
        raise ConfigError(
            f"No sandbox can be created in {text!r}: SLURM takes no blanks or special characters in paths.",
            hint="Name another folder with --dir, for instance --dir /tmp/sandbox.",
        )

    if len(text) > LONGEST_ROOT:
        raise ConfigError(
            f"The path {text!r} has {len(text)} characters; paths of sockets in it allow {LONGEST_ROOT}.",
            hint="Name a shorter folder with --dir, for instance --dir /tmp/sandbox.",
        )


def from_json(record: Mapping[str, Any]) -> Plan:
    """Return the plan from the content of its file."""
    plan = record["plan"]
    request = {**plan["request"], "root": Path(plan["request"]["root"])}
    if request["shared_folder"] is not None:
        request["shared_folder"] = Path(request["shared_folder"])
    # JSON holds tuples as lists.
    machine = {
        **plan["machine"],
        "slurm_version": tuple(plan["machine"]["slurm_version"]),
        "node_ports": tuple(plan["machine"]["node_ports"]),
    }

    return Plan(request=Request(**request), machine=Machine(**machine), namespaces=plan["namespaces"])
