"""Requeue of a job whose batch script is gone: with node 0, on which it ran, or killed alone.

SLURM leaves a job alone that may lose nodes, also when that was its first: it would stay, without anybody to
end it, until its time limit. A job whose script was killed has failed for SLURM. And where a site refuses to
put jobs back, only the batch step submits a new job. So an agent that is left runs that command of the
batch step (`first-node-lost` of `job.pyz`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from slurmddp.environments.names import EMULATED_VARIABLE, SCRIPT_PID_VARIABLE
from slurmddp.runs.folder.layout import RunFolder


def script_is_gone(environ: Mapping[str, str]) -> bool:
    """Return whether the batch script that started this agent, on the same host, runs no more."""
    pid = environ.get(SCRIPT_PID_VARIABLE, "")
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # The number may be another process's by now; SLURM tells.
    return False


def put_back(folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Let the batch step requeue the job if its script is gone; returns when that is done, or seen.

    It may take a quarter of an hour, since SLURM takes its time: end the ranks before. Nothing is
    done in a local run, nor where SLURM's commands are not at hand (in a container).
    """
    has_slurm = shutil.which("scontrol", path=environ.get("PATH")) and not environ.get(EMULATED_VARIABLE)
    if not has_slurm or not folder.batch_file.exists():
        return
    command = [sys.executable, "-IS", str(folder.batch_file), "first-node-lost"]
    subprocess.run(command, stdin=subprocess.DEVNULL, env=dict(environ))
