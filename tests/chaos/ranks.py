"""The rank processes of a run, found from outside as a murderer must: through /proc."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from slurmddp.environments.names import ATTEMPT_VARIABLE

PROC = Path("/proc")
AGENT = b"slurmddp.launchers.agent"


@dataclass(frozen=True)
class RankProcess:
    """A rank that runs, and where."""

    pid: int
    rank: int
    node: str


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    leads: bool
    """Whether it leads a process group that is not a session."""
    environ: dict[str, str]


def find(run_dir: Path, attempt: int, ranks_per_node: int) -> list[RankProcess]:
    """Return the ranks of one attempt, in order.

    A rank is a child of an agent with the agent's command, and leads a process group in the agent's session.
    """
    mine = {
        process.pid: process
        for process in _of_run(run_dir)
        if process.environ.get(ATTEMPT_VARIABLE) == str(attempt)
    }
    found = []
    for agent in (pid for pid, process in mine.items() if process.parent not in mine):
        children = sorted(pid for pid, process in mine.items() if process.parent == agent and process.leads)
        for local_rank, pid in enumerate(children):
            environ = mine[pid].environ
            first = int(environ.get("SLURM_NODEID", "0")) * ranks_per_node
            found.append(RankProcess(pid, first + local_rank, environ.get("SLURMD_NODENAME", "")))
    return sorted(found, key=lambda process: process.rank)


def _of_run(run_dir: Path) -> list[_Process]:
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            # A process may end while it is looked at.
            with contextlib.suppress(OSError, ValueError, IndexError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if words[1:4] == [b"-m", AGENT, str(run_dir).encode()]:
                    pid, (parent, group, session) = int(folder.name), _place(folder)
                    leads = group == pid != session
                    found.append(_Process(pid, parent, leads, _environ(folder)))
    return found


def _place(folder: Path) -> list[int]:
    """Return parent, process group and session."""
    return [
        int(word) for word in (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1:4]
    ]


def _environ(folder: Path) -> dict[str, str]:
    entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
