"""A cluster job, a run of the command, and its run folder, for tests of `slurmddp train`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slurmddp.environments.scrub import scrub
from slurmddp.runs.folder.layout import RunFolder

BIG = ("+cluster=big", "nodes=3", "name=first")


def only_run(project: Path) -> RunFolder:
    (path,) = (project / "runs").iterdir()
    return RunFolder(path)


def slurmddp(folder: Path, *arguments: str, **environ: str) -> str:
    """Run the command in a new process, which must succeed; return both streams."""
    done = subprocess.run(
        [sys.executable, "-m", "slurmddp", *arguments],
        cwd=folder,
        env={**scrub(os.environ), "OMP_NUM_THREADS": "1", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
