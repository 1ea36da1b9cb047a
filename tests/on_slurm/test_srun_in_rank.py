"""A rank that starts a step of its own, on a real SLURM: 24.11 refuses CPU variables that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox
from support.slurm.train_project import Command, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

SCRIPT = """
import os, subprocess
if os.environ["RANK"] == "0":
    subprocess.run(["srun", "--overlap", "--nodes=1", "--ntasks=1", "true"], check=True)
"""


def test_srun_works_inside_a_rank(sandbox: Sandbox, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    (project / "steps.py").write_text(SCRIPT)
    command = Command(project, sandbox.environment())
    size = ["nodes=1", "ranks_per_node=2", "cpus_per_node=4"]
    run = command.submit("steps", *size, "program.script=steps.py")
    run.wait("end", lambda: run.events("ended"), 120)
    assert run.events("ended")[0]["outcome"] == "finished", run.story()
