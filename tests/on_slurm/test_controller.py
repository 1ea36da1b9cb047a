"""The controller on a real SLURM: in an allocation by srun and by its command, and as a submitted run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox
from support.slurm.train_project import Command, Run, make_project

pytestmark = pytest.mark.slurm

SCRIPT = """
import sys
from slurmddp import remote

with remote.workers(4) as w:
    parts = [remote.ones(2, node=node) for node in range(4)]
    w.all_reduce(parts)
    hosts = [w.node(one).host for one in range(4)]
    print("found", parts[3].tolist(), hosts[0] == hosts[1] != hosts[2] == hosts[3], flush=True)
"""


def test_workers_are_ranks_on_the_nodes_of_an_allocation_or_of_a_run(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project")
    (project / "script.py").write_text(SCRIPT)
    own = [sys.executable, "-m", "slurmddp", "controller"]
    allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    for words in ([sys.executable], [*own, "-n", "4"]):
        command = [*allocation, *words, "script.py"]
        done = subprocess.run(
            command, cwd=project, env=sandbox.environment(), capture_output=True, text=True, timeout=100
        )
        assert done.stdout.count("found [4.0, 4.0] True") == 1, done.stdout + done.stderr
        assert done.returncode == 0
    command_line = Command(project, sandbox.environment())
    command_line("controller", "+cluster=sandbox", "name=own", "nodes=2", "ranks_per_node=2", "script.py")
    (folder,) = (project / "runs").glob("own-*")
    run = Run(folder, command_line)
    run.wait("end", lambda: run.events("ended"))
    assert run.events("ended")[0]["outcome"] == "finished", run.story()
    assert "found [4.0, 4.0] True" in command_line("logs", "own")
