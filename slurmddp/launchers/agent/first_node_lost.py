"""Requeue a job whose batch script no longer runs: the script was killed, or its node (node 0) was lost.

A job that tolerates the loss of nodes stays in SLURM until its time limit if it loses the first node. A job
whose script was killed counts as failed for SLURM. If a site refuses to requeue jobs, only the batch step can
submit a new job. So a remaining agent runs the command `first-node-lost` of `job.pyz`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from slurmddp.environments.names import SCRIPT_PID_VARIABLE
from slurmddp.runs.folder.layout import RunFolder


def batch_script_is_gone(environ: Mapping[str, str]) -> bool:
    """Return whether the batch script of this job, which started this agent on this host, has ended.

    The result is False if the environment has no pid of a batch script.
    """
    pid = environ.get(SCRIPT_PID_VARIABLE, "")
    if not pid.isdecimal():
        return False

    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        # Another account's process may have got the pid, so this is no proof that the script runs. The
        # command `first-node-lost` asks SLURM later.
        pass
    return False


def requeue(folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Run the command `first-node-lost`, which requeues the job if its batch script is gone, and wait for it.

    SLURM may take a quarter of an hour to answer, so call this only after the ranks have ended. Do nothing
    in a run without a batch script, and in a container without SLURM's commands.
    """
    has_slurm = shutil.which("scontrol", path=environ.get("PATH")) and environ.get(SCRIPT_PID_VARIABLE)
    if not has_slurm or not folder.batch_file.exists():
        return

    command = [sys.executable, "-IS", str(folder.batch_file), "first-node-lost"]
    subprocess.run(command, stdin=subprocess.DEVNULL, env=dict(environ))
