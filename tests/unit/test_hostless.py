"""An agent that has lost the first node runs the lines of the script for that, where it can."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from slurm_jobs import PROGRAMS

from slurmddp.launchers.hostless import put_back, script_is_gone
from slurmddp.runs.folder.layout import RunFolder

SCRIPT = 'echo "$1 $SLURM_JOB_ID" >>"${0%/*}/asked"\nread -r line && echo typed >>"${0%/*}/asked"; exit 3\n'


@pytest.mark.parametrize(
    ("environ", "script", "asked"),
    [
        ({}, SCRIPT, "hostless 41\n"),
        ({"SLURMDDP_EMULATED": "1"}, SCRIPT, None),
        ({"PATH": "/usr/bin/none"}, SCRIPT, None),
        ({}, None, None),
    ],
    ids=["under SLURM", "in a local run", "in a container", "without a script"],
)
def test_the_script_is_asked(
    tmp_path: Path, environ: dict[str, str], script: str | None, asked: str | None
) -> None:
    folder = RunFolder(tmp_path)
    if script:
        folder.script_file.write_text(script)
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    put_back(folder, {**os.environ, "PATH": path, "SLURM_JOB_ID": "41", **environ})
    found = tmp_path / "asked"
    assert (found.read_text() if found.exists() else None) == asked


def test_a_script_that_was_killed_is_gone() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert script_is_gone({"SLURMDDP_SCRIPT_PID": str(ended.pid)})
    assert not script_is_gone({"SLURMDDP_SCRIPT_PID": str(os.getpid())})
    assert not script_is_gone({}), "in a local run"
