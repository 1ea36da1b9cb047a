"""The agents of a run, one for each node, on this machine and with torch; none outlives its test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import start_agent


@contextmanager
def agents_of(
    folder: RunFolder,
    nodes: int,
    *,
    attempt: int = 0,
    program: str = "",
    words: Sequence[str] = (),
    **environ: str,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the agents of all nodes, by a Python `program` with these `words` where one is given."""
    command = [sys.executable, "-m", "slurmddp.launchers.agent"]
    if program:
        script = folder.path / "start_agent.py"
        script.write_text(program)
        command = [sys.executable, str(script), *words]
    agents = [
        start_agent(folder, attempt=attempt, nodes=nodes, node_rank=node_rank, command=command, **environ)
        for node_rank in range(nodes)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()  # Nothing but a test that has failed leaves it running.
            agent.wait()


def codes_of(agents: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for the end of all agents; the limit only ends a test that hangs."""
    return [agent.wait(timeout=400) for agent in agents]


def logs(folder: RunFolder) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.log_dir(0).glob("*.*")))
