"""Start daemons that outlive the command, and find all processes of a sandbox later.

A record holds the start time of its process, because the kernel may give the pid to another process later.
`members` finds processes without a record too: job steps, and processes that jobs left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.environments.names import SANDBOX_JOB_VARIABLE, SANDBOX_ROOT_VARIABLE
from slurmddp.errors import SlurmError
from slurmddp.host import process as identity
from slurmddp.host.process import PROC

DETACH = 'setsid "$@" </dev/null >>"$0" 2>&1 & echo $!'


@dataclass(frozen=True)
class Recorded:
    """The record of a started process."""

    name: str
    pid: int
    started: str

    def alive(self) -> bool:
        """Return whether this process still runs."""
        return start_time(self.pid) == self.started


def start_time(pid: int) -> str | None:
    """Return the start time of a running process; None for a process that is gone or a zombie."""
    fields = identity.stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return identity.start_time(pid)


def start(
    name: str, argv: Sequence[str], *, root: Path, environment: Mapping[str, str], folder: Path | None = None
) -> Recorded:
    """Start a daemon in a new session with its output in `log/<name>.out`, and record it.

    The environment must hold `SANDBOX_ROOT_VARIABLE`, by which `members` finds processes without a record.
    """
    output = root / "log" / f"{name}.out"
    # The shell ends at once, so that init adopts the daemon and no zombie stays in this process.
    shell = subprocess.run(
        ["/bin/sh", "-c", DETACH, str(output), *argv],
        env=dict(environment),
        cwd=folder or root,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    pid = int(shell.stdout)
    recorded = Recorded(name, pid, start_time(pid) or "")
    record = {"name": name, "pid": pid, "started": recorded.started}
    (root / "run" / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")

    return recorded


def recorded(root: Path) -> dict[str, Recorded]:
    """Return all recorded daemons by name, without incomplete records."""
    records: dict[str, Recorded] = {}
    for path in sorted((root / "run").glob("*.json")):
        # An incomplete record is just being written, or its writer was killed.
        with contextlib.suppress(OSError, ValueError, TypeError):
            entry = Recorded(**json.loads(path.read_text(encoding="utf-8")))
            records[entry.name] = entry

    return records


def members(root: Path, namespaces: frozenset[str] = frozenset()) -> set[int]:
    """Return the pids of all running processes of the sandbox in `root`."""
    pids = {entry.pid for entry in recorded(root).values() if entry.alive()}
    for process in PROC.glob("[0-9]*"):
        # The process may have ended since the folder was listed.
        with contextlib.suppress(OSError):
            pid = int(process.name)
            if pid != os.getpid() and start_time(pid) is not None and _belongs(process, root, namespaces):
                pids.add(pid)

    return pids


def _belongs(process: Path, root: Path, namespaces: frozenset[str]) -> bool:
    """Return whether a process belongs to the sandbox in `root`, by its namespace, environment or folder."""
    if namespaces and network_namespace(int(process.name)) in namespaces:
        return True

    # A variable ends with a null byte. The whole root is compared, because the root of another sandbox may
    # begin with this root.
    variables = (f"{SANDBOX_ROOT_VARIABLE}={root}\0".encode(), f"{SANDBOX_JOB_VARIABLE}={root}/".encode())
    environ = b"\0" + (process / "environ").read_bytes() + b"\0"
    return any(b"\0" + variable in environ for variable in variables) or works_in(process, root)


def works_in(process: Path, folder: Path) -> bool:
    """Return whether a process is a daemon of SLURM that started in `folder` or below.

    slurmstepd overwrites its environment with its title, but keeps the working folder of its slurmd.
    """
    name = (process / "comm").read_text(encoding="utf-8", errors="replace")
    return name.startswith("slurm") and (process / "cwd").readlink().is_relative_to(folder)


def network_namespace(pid: int) -> str | None:
    """Return the network namespace of a process; None if the process is gone."""
    try:
        return str((PROC / str(pid) / "ns/net").readlink())
    except OSError:
        return None


def kill_all(find: Callable[[], set[int]], *, patience_s: float = 20) -> None:
    """Kill the processes that `find` returns until it returns none; raise SlurmError after `patience_s`."""
    # The search is repeated, because a process may fork before its signal arrives.
    deadline = time.monotonic() + patience_s
    while pids := find():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

        if time.monotonic() > deadline:
            raise SlurmError(
                f"Processes of the sandbox still run {patience_s:g} s after SIGKILL: {sorted(pids)}.",
                hint="They may belong to another user, or hang in the file system. End them, then run "
                "`slurmddp sandbox down` again.",
            )

        time.sleep(0.02)
