"""Start a real SLURM of several nodes on this machine in seconds, and remove it completely."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.environments.names import SANDBOX_ROOT_VARIABLE
from slurmddp.errors import ConfigError, SlurmError, plain
from slurmddp.sandbox import daemons, machine, mounts, network, plan, processes, record, shell
from slurmddp.sandbox.plan import Plan, Request

CANCEL_PATIENCE_S = 3
"""Seconds that `down` waits for cancelled jobs, before it kills their processes."""


@dataclass(frozen=True)
class Status:
    """The state of a sandbox's daemons and nodes."""

    daemons: dict[str, bool]
    """Whether each daemon runs, by the name of the daemon."""
    nodes: dict[str, str]
    """The state of each node in SLURM, by the name of the node; empty if SLURM does not answer."""

    @property
    def healthy(self) -> bool:
        up = {"idle", "mixed", "allocated", "completing"}
        return bool(self.nodes) and all(self.daemons.values()) and set(self.nodes.values()) <= up


class Sandbox:
    """A SLURM cluster on this machine.

    Args:
        name: the name of the sandbox.
        root: the state folder; None: ~/.local/state/slurmddp/sandbox/NAME.
        sizes: fields of `Request`; None stands for the field's default.
    """

    def __init__(self, name: str = "default", *, root: Path | None = None, **sizes: Any) -> None:
        folder = root.absolute() if root is not None else record.home(os.environ) / name
        self._given_sizes = {key: value for key, value in sizes.items() if value is not None}
        if "shared_folder" in self._given_sizes:
            # The kernel names a mount by the path without links.
            self._given_sizes["shared_folder"] = self._given_sizes["shared_folder"].resolve()
        self.request = Request(name=name, root=folder, **self._given_sizes)

    @property
    def root(self) -> Path:
        """The state folder: configuration, logs, sockets, database."""
        return self.request.root

    @property
    def plan(self) -> Plan:
        """Return the plan of the running sandbox; raise SlurmError if there is no such sandbox."""
        return record.read(self.root, self.request.name)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple(node.name for node in self.plan.nodes)

    def exists(self) -> bool:
        """Return whether the sandbox exists, running or not."""
        return record.exists(self.root)

    def up(self) -> bool:
        """Start the sandbox and wait until its nodes are idle; return False if it runs already."""
        plan.check(self.request)
        with machine.machine_lock():
            if self._is_up_already():
                return False

            # Parts of an earlier sandbox may still exist, if its slurmctld has ended or its start was
            # interrupted.
            self._take_down()
            layout = machine.lay_out(self.request, os.environ)
            with self._all_or_nothing():
                self._create_root(layout)
                environment = self._daemon_environment()
                daemons.write_files(layout)
                if layout.namespaces:
                    network.build(layout, environment)
                if layout.request.shared:
                    mounts.build(layout, environment)
                daemons.start_all(layout, environment)

        return True

    def _is_up_already(self) -> bool:
        """Decide whether the sandbox runs; raise ConfigError if it runs with other sizes than requested."""
        if not (self.exists() and self._has_controller()):
            return False

        running = self.plan
        sizes = {**vars(running.request), "namespaces": running.namespaces}
        if any(sizes[key] != value for key, value in self._given_sizes.items()):
            raise ConfigError(
                f"The sandbox {self.request.name!r} is up already, with {describe(running)}.",
                hint="Run `slurmddp sandbox down` first, or give the new sandbox another --name.",
            )

        return True

    def _create_root(self, layout: Plan) -> None:
        """Create the state folder, and record the plan in it."""
        self.root.mkdir(parents=True, exist_ok=True)
        # `down` will remove the whole folder, so the folder must hold nothing else.
        if not record.is_free(self.root):
            raise ConfigError(
                f"{self.root} is not empty and holds no sandbox, so none can be created there.",
                hint="Name a folder that does not exist, with --dir.",
            )

        self.root.chmod(0o700)
        record.write(self.root, layout)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Stop and remove the sandbox if the block fails."""
        try:
            yield
        except BaseException as error:
            # BaseException, so that Ctrl-C leaves no daemons behind either.
            self._take_down()
            if isinstance(error, (OSError, subprocess.SubprocessError)):
                reason = plain(error) if isinstance(error, OSError) else error
                raise SlurmError(
                    f"The sandbox did not start: {reason}.",
                    hint="All processes and files of the sandbox were removed again.",
                ) from error
            raise

    def down(self) -> bool:
        """Stop and remove the sandbox with its jobs; return False if no such sandbox exists."""
        if not self.exists():
            return False

        # The jobs are cancelled first, because an `srun` in a terminal would otherwise not return.
        if self._has_controller():
            with contextlib.suppress(SlurmError):
                self.cancel_jobs(CANCEL_PATIENCE_S)

        with machine.machine_lock():
            self._take_down()

        return True

    def _has_controller(self) -> bool:
        controller = processes.recorded(self.root).get("slurmctld")
        return controller is not None and controller.alive()

    def cancel_jobs(self, patience_s: float = 30) -> bool:
        """Cancel all jobs; return whether all were gone within `patience_s`."""
        deadline = time.monotonic() + patience_s
        while jobs := self.jobs():
            # scancel is repeated, because a cancelled job may requeue itself and is then pending again.
            uncancelled = [job for job, state in jobs.items() if state != "COMPLETING"]
            if uncancelled:
                with contextlib.suppress(SlurmError):
                    self.command("scancel", *uncancelled)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

        return True

    def jobs(self) -> dict[str, str]:
        """Return the state of each job that has not ended, by job id."""
        # `%i`, not `%A`: SLURM 22.05 can't cancel an array element by its own number if the first element
        # has ended.
        output = self.command("squeue", "--noheader", "--array", "--states=PD,R,CG,S,CF", "--format=%i|%T")
        return dict(line.split("|", 1) for line in output.splitlines())

    def command(self, *arguments: str) -> str:
        """Run a SLURM command on this sandbox, in a bare environment; return its output.

        Args:
            arguments: the name of the program, and its arguments.

        Raises:
            SlurmError: the command failed.
        """
        environment = self._daemon_environment()
        program = machine.find_program(arguments[0], environment["PATH"])
        command = [program, *arguments[1:]]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        if result.returncode != 0:
            raise SlurmError(
                f"{' '.join(arguments)} failed: {result.stderr.strip()}",
                hint="Run `slurmddp sandbox status`.",
            )

        return result.stdout

    def _take_down(self) -> None:
        """Kill all processes, and remove network and state folder, even after an incomplete start."""
        if not self.exists():
            return

        layout = self.plan
        # The namespaces lead to the processes of a node, so they are read before their holders are killed.
        namespaces = network.namespaces_of(layout)
        processes.kill_all(lambda: processes.members(self.root, namespaces))
        mounts.remove(layout, self._daemon_environment())
        network.remove(layout, self._daemon_environment())
        shutil.rmtree(self.root)

    def status(self) -> Status:
        """Return the state of daemons and nodes; raise SlurmError if there is no such sandbox."""
        layout = self.plan
        alive = {name: entry.alive() for name, entry in processes.recorded(self.root).items()}

        states: dict[str, str] = {}
        # Without slurmctld and munged, sinfo would wait for its time-out.
        if alive.get("slurmctld", False) and alive.get("munged", False):
            states = daemons.node_states(layout, self._daemon_environment())

        return Status(alive, states)

    def environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that make this sandbox the SLURM of a process that has `environ`."""
        if environ is None:
            environ = os.environ
        path = machine.search_path(environ)
        programs = [machine.find_program(name, path) for name in ("sbatch", "slurmctld")]

        return shell.variables(self.plan, [str(Path(program).parent) for program in programs], environ)

    def _daemon_environment(self) -> dict[str, str]:
        """Return the environment of the daemons, which has only PATH of the caller's variables."""
        return {
            "PATH": machine.search_path(os.environ),
            "HOME": str(self.root),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.root / "slurm.conf"),
            SANDBOX_ROOT_VARIABLE: str(self.root),
        }


def describe(layout: Plan) -> str:
    """Return the sizes of a sandbox as a phrase."""
    request = layout.request
    nodes = "1 node" if request.nodes == 1 else f"{request.nodes} nodes"
    network_kind = "own network namespaces" if layout.namespaces else "loopback"
    if request.link_mbit:
        network_kind += f" with links of {request.link_mbit} Mbit/s"

    mount = ""
    if request.shared:
        mount = f", {request.shared_folder} mounted by {request.shared} on each node"
        mount += f" ({request.mount_options})" if request.mount_options else ""

    return (
        f"{nodes} of {request.cpus} CPUs and {request.gpus} fake GPUs, {network_kind}, "
        f"accounting {'on' if request.accounting else 'off'}{mount}"
    )
