"""`Sandbox`: a real SLURM of several nodes on this machine, started in seconds and removed completely."""

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
from slurmddp.sandbox import daemons, machine, network, plan, processes, record, shell
from slurmddp.sandbox.plan import Plan, Request

CANCEL_PATIENCE_S = 3


@dataclass(frozen=True)
class Status:
    """The running daemons, and the states of the nodes in SLURM; empty if SLURM does not answer."""

    daemons: dict[str, bool]
    nodes: dict[str, str]

    @property
    def healthy(self) -> bool:
        up = {"idle", "mixed", "allocated", "completing"}
        return bool(self.nodes) and all(self.daemons.values()) and set(self.nodes.values()) <= up


class Sandbox:
    """A sandbox; `root` is its state folder, by default ~/.local/state/slurmddp/sandbox/NAME."""

    def __init__(self, name: str = "default", *, root: Path | None = None, **sizes: Any) -> None:
        """Prepare a sandbox; `sizes` are fields of `Request`, and None stands for the default."""
        folder = root.absolute() if root is not None else record.home(os.environ) / name
        self._asked = {key: value for key, value in sizes.items() if value is not None}
        self.request = Request(name=name, root=folder, **self._asked)

    @property
    def root(self) -> Path:
        """The state folder: configuration, logs, sockets, database."""
        return self.request.root

    @property
    def plan(self) -> Plan:
        """The plan of the running sandbox; raises SlurmError if there is no such sandbox."""
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
            self._take_down()
            layout = machine.lay_out(self.request, os.environ)
            with self._all_or_nothing():
                self._begin(layout)
                environment = self._daemon_environment()
                daemons.write_files(layout)
                if layout.namespaces:
                    network.build(layout, environment)
                daemons.start_all(layout, environment)
        return True

    def _is_up_already(self) -> bool:
        if not (self.exists() and self._has_controller()):
            return False
        running = self.plan
        is_so = {**vars(running.request), "namespaces": running.namespaces}
        if any(is_so[key] != value for key, value in self._asked.items()):
            raise ConfigError(
                f"The sandbox {self.request.name!r} is up already, with {describe(running)}.",
                hint="Run `slurmddp sandbox down` first, or give this one another --name.",
            )
        return True

    def _begin(self, layout: Plan) -> None:
        """Create the state folder and record the plan in it."""
        self.root.mkdir(parents=True, exist_ok=True)
        if not record.is_free(self.root):
            raise ConfigError(
                f"{self.root} is not empty, and not a sandbox.",
                hint="Name a folder that does not exist, with --dir.",
            )
        self.root.chmod(0o700)
        record.write(self.root, layout)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._take_down()
            if isinstance(error, (OSError, subprocess.SubprocessError)):
                reason = plain(error) if isinstance(error, OSError) else error
                raise SlurmError(
                    f"The sandbox did not come up: {reason}.", hint="Everything was taken down again."
                ) from error
            raise

    def down(self) -> bool:
        """Stop and remove the sandbox with its jobs; return False if no such sandbox exists."""
        if not self.exists():
            return False
        if self._has_controller():
            with contextlib.suppress(SlurmError):
                self.cancel_jobs(CANCEL_PATIENCE_S)  # so that an `srun` in a terminal returns
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
            # A job may requeue itself after the cancel, and is then pending again.
            if waiting := [job for job, state in jobs.items() if state != "COMPLETING"]:
                with contextlib.suppress(SlurmError):
                    self.command("scancel", *waiting)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def jobs(self) -> dict[str, str]:
        """Return id -> state of all jobs that are not over."""
        # `%i`, not `%A`: SLURM 22.05 can't cancel an element of an array by its own number if the first
        # element is over.
        answer = self.command("squeue", "--noheader", "--array", "--states=PD,R,CG,S,CF", "--format=%i|%T")
        return dict(line.split("|", 1) for line in answer.splitlines())

    def command(self, *words: str) -> str:
        """Run a SLURM command on this sandbox, in a bare environment, and return what it printed."""
        environment = self._daemon_environment()
        program = machine.find_program(words[0], environment["PATH"])
        answer = subprocess.run(
            [program, *words[1:]], env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        if answer.returncode != 0:
            raise SlurmError(
                f"{' '.join(words)} failed: {answer.stderr.strip()}", hint="Run `slurmddp sandbox status`."
            )
        return answer.stdout

    def _take_down(self) -> None:
        """Kill all processes, and remove network and state folder, even after an incomplete start."""
        if not self.exists():
            return
        layout = self.plan
        namespaces = network.namespaces_of(layout)
        processes.kill_all(lambda: processes.members(self.root, namespaces))
        network.remove(layout, self._daemon_environment())
        shutil.rmtree(self.root)

    def status(self) -> Status:
        """Return the state of daemons and nodes; raises SlurmError if there is no such sandbox."""
        layout = self.plan
        alive = {name: entry.alive() for name, entry in processes.recorded(self.root).items()}
        answers = alive.get("slurmctld", False) and alive.get("munged", False)
        states = daemons.node_states(layout, self._daemon_environment()) if answers else {}
        return Status(alive, states)

    def environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that make this sandbox the SLURM of a process that has `environ`."""
        given = os.environ if environ is None else environ
        path = machine.search_path(given)
        programs = [machine.find_program(name, path) for name in ("sbatch", "slurmctld")]
        return shell.variables(self.plan, [str(Path(program).parent) for program in programs], given)

    def _daemon_environment(self) -> dict[str, str]:
        """Return the environment of the daemons: of the caller's variables only PATH."""
        return {
            "PATH": machine.search_path(os.environ),
            "HOME": str(self.root),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.root / "slurm.conf"),
            SANDBOX_ROOT_VARIABLE: str(self.root),
        }


def describe(layout: Plan) -> str:
    """Return the size of a sandbox in one phrase."""
    request = layout.request
    nodes = "1 node" if request.nodes == 1 else f"{request.nodes} nodes"
    network_kind = "own network namespaces" if layout.namespaces else "loopback"
    network_kind += f" with links of {request.link_mbit} Mbit/s" if request.link_mbit else ""
    return (
        f"{nodes} of {request.cpus} CPUs and {request.gpus} fake GPUs, {network_kind}, "
        f"accounting {'on' if request.accounting else 'off'}"
    )
