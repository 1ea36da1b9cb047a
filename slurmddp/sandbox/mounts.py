"""Mount a folder on each node of a sandbox, as the nodes of a cluster mount a shared file system.

A node's mount namespace shows the folder of this machine under `real_folder`, and the mount in the folder's
place. This machine, which stands for the login node, works on the folder itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from slurmddp.errors import SlurmError
from slurmddp.host.process import PROC
from slurmddp.sandbox import daemons, network, processes
from slurmddp.sandbox.machine import find_program
from slurmddp.sandbox.plan import Plan, SandboxNode

START_LIMIT_S = 30
SSHFS_OPTIONS = "auto_cache,dcache_timeout=60,entry_timeout=60,attr_timeout=60,negative_timeout=30"
"""Listings, names and attributes are remembered for a minute, which is more than NFS does."""


def client(node: SandboxNode) -> str:
    """Return the name under which the process that serves the mount of a node is recorded."""
    return f"mount-{node.name}"


def real_folder(plan: Plan) -> Path:
    """Return the path by which the namespace of a node reaches the folder below its mount."""
    return plan.root / "shared"


def build(plan: Plan, environment: Mapping[str, str]) -> None:
    """Mount the shared folder on all nodes."""
    real_folder(plan).mkdir()
    if plan.request.shared == "sshfs":
        _write_server(plan, environment)

    for node in plan.nodes:
        bind = ["mount", "--bind", str(plan.request.shared_folder), str(real_folder(plan))]
        _run_on(plan, node, environment, bind)
        start_client(plan, node, environment)


def _write_server(plan: Plan, environment: Mapping[str, str]) -> None:
    """Write the program that sshfs starts in place of ssh: the SFTP server, without a connection."""
    script = _server_script(plan)
    server = find_program("sftp-server", environment["PATH"])
    script.write_text(f"#!/bin/sh\nexec {server}\n", encoding="utf-8")
    script.chmod(0o700)


def _server_script(plan: Plan) -> Path:
    return plan.root / "sftp-server"


def restore(plan: Plan, node: SandboxNode, environment: Mapping[str, str]) -> None:
    """Start the client of a node again, if it has ended."""
    entry = processes.recorded(plan.root).get(client(node))
    if entry is None or not entry.alive():
        start_client(plan, node, environment)


def start_client(plan: Plan, node: SandboxNode, environment: Mapping[str, str]) -> None:
    """Start the client of a node, in place of one that has ended, and wait until it serves the folder."""
    folder = str(plan.request.shared_folder)
    # The mount of a client that was killed stays, and answers with errors.
    if _is_mounted(plan, node):
        _run_on(plan, node, environment, ["umount", "--lazy", folder])

    command = _client_command(plan, environment)
    processes.start(
        client(node),
        [*network.enter(plan, node, environment), *command],
        root=plan.root,
        environment=environment,
    )
    daemons.wait_for(plan, f"mount of {folder}", lambda: _is_mounted(plan, node), [client(node)])


def _client_command(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """Return the command that mounts the shared folder and serves it until it ends."""
    request = plan.request
    if request.shared == "nfs":
        module = ["-m", "slurmddp.sandbox.nfs_client"]
        return [
            sys.executable,
            *module,
            str(real_folder(plan)),
            str(request.shared_folder),
            request.mount_options,
        ]

    options = f"ssh_command={_server_script(plan)},{SSHFS_OPTIONS}"
    if request.mount_options:
        options += f",{request.mount_options}"

    sshfs = find_program("sshfs", environment["PATH"])
    return [sshfs, "-f", "-o", options, f"server:{real_folder(plan)}", str(request.shared_folder)]


def _is_mounted(plan: Plan, node: SandboxNode) -> bool:
    """Return whether the node has a FUSE mount in place of the shared folder, without a question to it."""
    holder = processes.recorded(plan.root)[network.holder(node)]
    try:
        lines = (PROC / str(holder.pid) / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False

    # The kernel writes a blank as \040.
    folder = str(plan.request.shared_folder).replace("\\", "\\134").replace(" ", "\\040")
    # proc_pid_mountinfo(5): the fifth field is the folder, and the file system's type follows a hyphen.
    return any(line.split()[4] == folder and " - fuse" in line for line in lines)


def _run_on(plan: Plan, node: SandboxNode, environment: Mapping[str, str], command: list[str]) -> None:
    """Run a program in the namespaces of a node; raise SlurmError if it fails."""
    result = subprocess.run(
        [
            *network.enter(plan, node, environment),
            find_program(command[0], environment["PATH"]),
            *command[1:],
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if result.returncode != 0:
        raise SlurmError(
            f"{' '.join(command)} failed on {node.name}: {result.stderr.strip()}",
            hint="A container may forbid mounts; start the sandbox without --shared.",
        )
