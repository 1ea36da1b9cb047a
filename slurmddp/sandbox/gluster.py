"""Serve the shared folder of a sandbox by GlusterFS, and leave it as plain files afterwards.

The folder itself is the only brick of the volume. The server runs in a mount namespace that was made before
this machine mounted the volume over the folder, so it alone reaches the files below the mounts. Server and
clients read the volume from two files of the state folder, so no glusterd is needed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from slurmddp.errors import ConfigError
from slurmddp.sandbox import daemons, processes
from slurmddp.sandbox.machine import find_program
from slurmddp.sandbox.plan import Plan

SERVER = "server-glusterfs"
"""The name of the server's record."""
INTERNAL_FOLDER = ".glusterfs"
VOLUME_ID = "trusted.glusterfs.volume-id"
OWN_ATTRIBUTES = ("trusted.gfid", "trusted.glusterfs.", "trusted.pgfid.")
"""Prefixes of the names of the extended attributes that a brick writes to its files."""


def start_server(plan: Plan, environment: Mapping[str, str]) -> None:
    """Make the shared folder a brick, and start its server.

    Raises:
        ConfigError: the folder is a brick already, or its file system has no extended attributes.
    """
    folder = _folder(plan)
    _refuse_brick(folder)
    try:
        # The server takes no folder without this attribute.
        os.setxattr(folder, VOLUME_ID, uuid.UUID(plan.volume_id).bytes)
    except OSError as error:
        raise ConfigError(
            f"{folder} can't be a brick of GlusterFS: its file system takes no extended attributes "
            f"({error.strerror}).",
            hint="Name a folder on a local disk with --folder.",
        ) from error

    path = environment["PATH"]
    command = [find_program("unshare", path), "--mount", find_program("glusterfsd", path), "--no-daemon"]
    command += [f"--volfile={plan.root}/glusterfs-server.vol", f"--log-file={plan.root}/log/{SERVER}.log"]
    processes.start(SERVER, command, root=plan.root, environment=environment)
    daemons.wait_for(plan, "brick", lambda: daemons.listens_tcp(plan.machine.server_port), [SERVER])


def _folder(plan: Plan) -> Path:
    return Path(str(plan.request.shared_folder))


def _refuse_brick(folder: Path) -> None:
    if (folder / INTERNAL_FOLDER).exists() or VOLUME_ID in os.listxattr(folder):
        raise ConfigError(
            f"{folder} belongs to a volume of GlusterFS already.",
            hint="Name another folder with --folder. If it is left over from a sandbox that no longer "
            f"exists, remove {folder / INTERNAL_FOLDER} and the attribute {VOLUME_ID}.",
        )


def client_command(plan: Plan, name: str, environment: Mapping[str, str]) -> list[str]:
    """Return the command that mounts the volume on the shared folder and serves it until it ends."""
    options = [f"--{option}" for option in plan.request.mount_options.split(",") if option]
    return [
        find_program("glusterfs", environment["PATH"]),
        "--no-daemon",
        f"--volfile={plan.root}/glusterfs-client.vol",
        # The kernel shows this id as the source of the mount; `mounts.py` recognizes the mount by it.
        f"--volfile-id={plan.volume_id}",
        f"--log-file={plan.root}/log/{name}.log",
        *options,
        str(_folder(plan)),
    ]


def clean(plan: Plan) -> None:
    """Remove the server's files and attributes from the shared folder; do nothing if it is not its brick."""
    folder = _folder(plan)
    try:
        volume_id = os.getxattr(folder, VOLUME_ID)
    except OSError:
        return
    if volume_id != uuid.UUID(plan.volume_id).bytes:
        return

    # Each file below it is a second name of a file of the shared folder.
    shutil.rmtree(folder / INTERNAL_FOLDER, ignore_errors=True)
    # The folder comes last, so that an interrupted call can be repeated.
    for path in [*folder.rglob("*"), folder]:
        _remove_attributes(path)


def _remove_attributes(path: Path) -> None:
    # A file may have gone since its folder was listed.
    with contextlib.suppress(OSError):
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith(OWN_ATTRIBUTES):
                os.removexattr(path, name, follow_symlinks=False)
