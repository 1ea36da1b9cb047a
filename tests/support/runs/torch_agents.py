"""The agents of a run, one for each node, on this machine and with torch; none outlives its test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from slurmddp.runs.folder.layout import RunFolder
from support import TESTS
from support.runs import restarting_runs


def agents_of(
    folder: RunFolder, nodes: int, *, program: str = "", **options: Any
) -> AbstractContextManager[list[subprocess.Popen[bytes]]]:
    """Start the agents of all nodes; if `program` is given, as this Python program.

    The ranks can import from the tests.
    """
    options = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", **options}
    command = [sys.executable, "-m", "slurmddp.launchers.agent"]
    if program:
        script = folder.path / "start_agent.py"
        script.write_text(program)
        command = [sys.executable, str(script)]

    return restarting_runs.agents_of(folder, nodes, commands=dict.fromkeys(range(nodes), command), **options)


def codes_of(agents: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for the end of all agents; the limit only ends a test that hangs."""
    return [agent.wait(timeout=400) for agent in agents]


def logs(folder: RunFolder) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.log_dir(0).glob("*.*")))
