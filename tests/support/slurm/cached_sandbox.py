"""A sandbox whose nodes see a folder through clients of a network file system, each with its own cache.

The kernel may have no client of NFS, so each node mounts the folder by sshfs, with the rules of another file
system as far as options can set them. This machine, as the login node, works on the folder itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurmddp.sandbox import daemons, network, processes
from slurmddp.sandbox.machine import find_program
from slurmddp.sandbox.plan import Plan, SandboxNode
from support.slurm.faulty_sandbox import FaultySandbox

LIKE_NFS = "dir_cache=no,entry_timeout=3,attr_timeout=3,negative_timeout=30"
"""Options of sshfs: listings ask the server, files are cached for 3 s, and absent names for 30 s."""
LONG = "dcache_timeout=60,entry_timeout=60,attr_timeout=60,negative_timeout=30"
"""Options of sshfs: everything is cached, also listings, for a minute."""
SFTP_SERVER = "/usr/lib/openssh/sftp-server"
MOUNT = """
mkdir -p "$2" && mount --bind "$1" "$2" &&
sshfs -o "ssh_command=$3,auto_cache,$4" "server:$2" "$1" && shift 4 && exec "$@"
"""


class CachedSandbox(FaultySandbox):
    """A sandbox of hosts that mount `shared`; needs root and namespaces."""

    def mount(self, shared: Path, options: str) -> None:
        """Start all nodes again, each in a mount namespace that has its own mount of `shared`."""
        if not self.plan.namespaces or shutil.which("sshfs") is None:
            pytest.fail("mounts need root, and the Debian package sshfs", pytrace=False)
        server = self.root / "sftp-server"
        server.write_text(f"#!/bin/sh\nexec {SFTP_SERVER}\n")
        server.chmod(0o700)
        environment = self._daemon_environment()

        for node in self.plan.nodes:
            self._kill(node.name)
            inside = ["unshare", "--mount", "--propagation=private", "sh", "-c", MOUNT, "mount"]
            inside += [str(shared), str(self.root / "shared" / node.name), str(server), options]
            start_node(self.plan, node, inside, environment)

        daemons.wait_for(
            self.plan, "idle nodes", lambda: daemons.idle(self.plan, environment), ["slurmctld", *self.nodes]
        )


def start_node(plan: Plan, node: SandboxNode, prefix: list[str], environment: Mapping[str, str]) -> None:
    """Start the slurmd of a node within a command."""
    slurmd = [find_program("slurmd", environment["PATH"]), "-D", "-N", node.name]
    processes.start(
        node.name,
        [*network.enter(plan, node, environment), *prefix, *slurmd],
        root=plan.root,
        environment=environment,
        folder=plan.root / "spool" / node.name,
    )
