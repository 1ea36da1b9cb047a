"""Mount a folder on each node of a sandbox, as the nodes of a cluster mount a shared file system.

A node's mount namespace shows the folder of this machine under `real_folder`, and the mount in the folder's
place. This machine, which stands for the login node, works on the folder itself; only a volume of GlusterFS
is mounted here, too, because its server does not notice files that are written directly into the folder.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from slurmddp.errors import SlurmError
from slurmddp.host.process import PROC
from slurmddp.sandbox import daemons, gluster, network, processes
from slurmddp.sandbox.machine import find_program
from slurmddp.sandbox.plan import Plan, SandboxNode

SSHFS_OPTIONS = "auto_cache,dcache_timeout=60,entry_timeout=60,attr_timeout=60,negative_timeout=30"
"""Options of sshfs: it caches listings, names and attributes for a minute, longer than NFS does."""


def client(node: SandboxNode | None) -> str:
    """Return the name of the record of the process that serves a mount; None: the mount of this machine."""
    return f"mount-{'login' if node is None else node.name}"


def real_folder(plan: Plan) -> Path:
    """Return the path by which the namespace of a node reaches the folder below its mount."""
    return plan.root / "shared"


def build(plan: Plan, environment: Mapping[str, str]) -> None:
    """Mount the shared folder on all nodes."""
    if plan.request.shared == "glusterfs":
        # The namespaces of server and nodes exist before this machine covers the folder.
        gluster.start_server(plan, environment)
        for node in (*plan.nodes, None):
            start_client(plan, node, environment)
        return

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


def start_client(plan: Plan, node: SandboxNode | None, environment: Mapping[str, str]) -> None:
    """Start a client in place of one that has ended, and wait until it serves the folder.

    Args:
        plan: the plan of the sandbox.
        node: the node of the client; None: this machine.
        environment: the variables of the daemons.
    """
    folder = str(plan.request.shared_folder)
    # The mount of a client that was killed stays, and returns errors, so it is removed first.
    if _is_mounted(plan, node):
        _run_on(plan, node, environment, ["umount", "--lazy", folder])

    prefix = [] if node is None else network.enter(plan, node, environment)
    command = [*prefix, *_client_command(plan, client(node), environment)]
    processes.start(client(node), command, root=plan.root, environment=environment)
    daemons.wait_for(plan, f"mount of {folder}", lambda: _is_mounted(plan, node), [client(node)])


def _client_command(plan: Plan, name: str, environment: Mapping[str, str]) -> list[str]:
    """Return the command that mounts the shared folder and serves it until it ends."""
    request = plan.request
    folder = str(request.shared_folder)
    if request.shared == "glusterfs":
        return gluster.client_command(plan, name, environment)

    if request.shared == "nfs":
        module = ["-m", "slurmddp.sandbox.nfs_client"]
        return [sys.executable, *module, str(real_folder(plan)), folder, request.mount_options]

    options = f"ssh_command={_server_script(plan)},{SSHFS_OPTIONS}"
    if request.mount_options:
        options += f",{request.mount_options}"

    sshfs = find_program("sshfs", environment["PATH"])
    return [sshfs, "-f", "-o", options, f"server:{real_folder(plan)}", folder]


def remove(plan: Plan, environment: Mapping[str, str]) -> None:
    """Unmount the shared folder on this machine, and leave it as plain files.

    Raises:
        SlurmError: a folder is still mounted below the state folder, where its files would be deleted.
    """
    if plan.request.shared == "glusterfs":
        # A start that was interrupted may have mounted nothing yet.
        while _is_mounted(plan, None):
            _run_on(plan, None, environment, ["umount", "--lazy", str(plan.request.shared_folder)])
        gluster.clean(plan)

    for fields in _mounts_of(None, plan):
        if Path(_unescaped(fields[4])).is_relative_to(plan.root):
            raise SlurmError(
                f"{_unescaped(fields[4])} is still mounted, so the state folder can't be removed.",
                hint=f"Run `umount {_unescaped(fields[4])}`, then `slurmddp sandbox down` again.",
            )


def _is_mounted(plan: Plan, node: SandboxNode | None) -> bool:
    """Return whether a client has mounted the shared folder, without a request to the client."""
    folder = str(plan.request.shared_folder)
    # On this machine, another program may have mounted something on the folder before.
    for fields in _mounts_of(node, plan):
        kind, source = fields[fields.index("-") + 1 :][:2]
        is_ours = node is not None or plan.volume_id in source
        if _unescaped(fields[4]) == folder and kind.startswith("fuse") and is_ours:
            return True

    return False


def _mounts_of(node: SandboxNode | None, plan: Plan) -> list[list[str]]:
    """Return the fields of each line of mountinfo, as proc_pid_mountinfo(5) describes them."""
    process = "self"
    if node is not None:
        process = str(processes.recorded(plan.root)[network.holder(node)].pid)
    try:
        text = (PROC / process / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []

    return [line.split(" ") for line in text.splitlines()]


def _unescaped(path: str) -> str:
    """Return a path from mountinfo with the kernel's escapes decoded, such as \\040 for a blank."""
    for character in " \t\n\\":
        path = path.replace(f"\\{ord(character):03o}", character)
    return path


def _run_on(plan: Plan, node: SandboxNode | None, environment: Mapping[str, str], command: list[str]) -> None:
    """Run a program in the namespaces of a node, or on this machine; raise SlurmError if it fails."""
    prefix = [] if node is None else network.enter(plan, node, environment)
    program = find_program(command[0], environment["PATH"])
    result = subprocess.run(
        [*prefix, program, *command[1:]], capture_output=True, text=True, check=False, timeout=60
    )
    if result.returncode != 0:
        raise SlurmError(
            f"{' '.join(command)} failed: {result.stderr.strip()}",
            hint="A container may forbid mounts; start the sandbox without --shared.",
        )
