"""An agent that has lost the first node runs the command of the batch step for that, where it can."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurmddp.launchers.agent.first_node_lost import batch_script_is_gone, requeue
from slurmddp.runs.folder.layout import RunFolder
from support.slurm.slurm_jobs import PROGRAMS

PROGRAM = """
import os, sys
from pathlib import Path
words = [*sys.argv[1:], os.environ["SLURM_JOB_ID"], sys.stdin.read()]
(Path(sys.argv[0]).parent / "asked").write_text(" ".join(words))
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("environ", "program", "asked"),
    [
        ({}, PROGRAM, "first-node-lost 41 "),
        ({"SLURMDDP_SCRIPT_PID": ""}, PROGRAM, None),
        ({"PATH": "/usr/bin/none"}, PROGRAM, None),
        ({}, None, None),
    ],
    ids=["under SLURM", "without a batch script", "in a container", "without a program"],
)
def test_the_batch_step_is_asked(
    tmp_path: Path, environ: dict[str, str], program: str | None, asked: str | None
) -> None:
    folder = RunFolder(tmp_path)
    if program:
        folder.batch_file.write_text(program)
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    requeue(folder, {**os.environ, "PATH": path, "SLURM_JOB_ID": "41", "SLURMDDP_SCRIPT_PID": "9", **environ})
    found = tmp_path / "asked"
    assert (found.read_text() if found.exists() else None) == asked


def test_a_script_that_was_killed_is_gone() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert batch_script_is_gone({"SLURMDDP_SCRIPT_PID": str(ended.pid)})
    assert not batch_script_is_gone({"SLURMDDP_SCRIPT_PID": str(os.getpid())})
    assert not batch_script_is_gone({}), "in a local run"
