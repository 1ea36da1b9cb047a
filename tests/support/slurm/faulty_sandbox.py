"""A sandbox whose nodes, links and controller can be broken and mended, for tests and `make chaos`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from slurmddp.environments.names import SANDBOX_JOB_VARIABLE
from slurmddp.host.process import PROC
from slurmddp.sandbox import Sandbox, daemons, mounts, network, processes
from slurmddp.sandbox.plan import SandboxNode


class FaultySandbox(Sandbox):
    def kill_node(self, name: str, *, with_jobs: bool = False) -> None:
        """Kill the slurmd of a node, as a crash does; `with_jobs` kills all its processes, like a power cut.

        A power cut also takes the node off the network, so that no connection is closed, and ends the client
        of its mount with the data that the server does not have yet. `restore_node` undoes all.
        """
        if with_jobs:
            if self.plan.namespaces:
                self.cut_link(name)
            cut_power(lambda: self._processes_on(name))

        self._kill(name)

    def restore_node(self, name: str) -> None:
        """Restart a killed node's slurmd and mount, and restore its link; SLURM then uses the node again."""
        if self.plan.namespaces:
            self.restore_link(name)
        if self.plan.request.shared:
            mounts.restore(self.plan, self._node(name), self._daemon_environment())
        entry = processes.recorded(self.root).get(name)
        if entry is None or not entry.alive():
            daemons.start_node(self.plan, self._node(name), self._daemon_environment())

    def restart_controller(self, down_s: float = 0.0) -> None:
        """Stop slurmctld by SIGTERM and start it again after `down_s` seconds."""
        entry = processes.recorded(self.root)["slurmctld"]
        with suppress(ProcessLookupError):
            os.kill(entry.pid, signal.SIGTERM)
        deadline = time.monotonic() + 120
        while entry.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._kill("slurmctld")
        time.sleep(down_s)
        daemons.start_controller(self.plan, self._daemon_environment())

    def cut_link(self, name: str) -> None:
        """Cut a node off the network; needs namespaces."""
        self._set_link(name, "down")

    def restore_link(self, name: str) -> None:
        self._set_link(name, "up")

    def hung_file_client(self, name: str) -> AbstractContextManager[None]:
        """Stop the client of the shared file system on a node for the time of a block."""
        return self._stopped_daemons(f"mount-{name}")

    def stopped_file_server(self) -> AbstractContextManager[None]:
        """Stop the server of the shared file system for the time of a block.

        Without a server process, all clients are stopped, which looks the same on the nodes.
        """
        names = processes.recorded(self.root)
        servers = [name for name in names if name.startswith("server-")]
        return self._stopped_daemons(*(servers or [name for name in names if name.startswith("mount-")]))

    @contextmanager
    def _stopped_daemons(self, *names: str) -> Iterator[None]:
        records = processes.recorded(self.root)
        stopped = [records[name] for name in names if records[name].alive()]
        try:
            for entry in stopped:
                os.kill(entry.pid, signal.SIGSTOP)
            yield
        finally:
            for entry in stopped:
                if entry.alive():
                    os.kill(entry.pid, signal.SIGCONT)

    def on_node(self, name: str) -> list[str]:
        """Return the prefix of a command that runs on a node without SLURM."""
        return network.enter(self.plan, self._node(name), self._daemon_environment())

    def _node(self, name: str) -> SandboxNode:
        return next(node for node in self.plan.nodes if node.name == name)

    def _kill(self, daemon: str) -> None:
        entry = processes.recorded(self.root)[daemon]
        processes.kill_all(lambda: {entry.pid} if entry.alive() else set())

    def _set_link(self, name: str, state: str) -> None:
        network.ip(self._daemon_environment(), [f"link set {self._node(name).link} {state}"])

    def _processes_on(self, name: str) -> set[int]:
        """Return the pids of slurmd, of job steps and of all other processes on a node."""
        pids = set()
        client = processes.recorded(self.root).get(mounts.client(self._node(name)))
        if client is not None and client.alive():
            pids.add(client.pid)

        mark = f"{SANDBOX_JOB_VARIABLE}={self.root}/{name}/".encode()
        for process in PROC.glob("[0-9]*"):
            with suppress(OSError):
                marked = any(
                    variable.startswith(mark) for variable in (process / "environ").read_bytes().split(b"\0")
                )
                ours = marked or processes.works_in(process, self.root / "spool" / name)
                if ours and processes.start_time(int(process.name)) is not None:
                    pids.add(int(process.name))

        return pids


def cut_power(find: Callable[[], set[int]]) -> None:
    """Kill all processes that `find` returns at once, so that none can react to the death of another."""
    stopped: set[int] = set()
    while new := find() - stopped:
        for pid in new:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)

        stopped |= new

    processes.kill_all(find)
