"""What an agent does when it has lost node 0: the batch script ran there, and may be gone with its host.

SLURM leaves a job alone that may lose nodes, also when that was its first: it would stay, without anybody to
end it, until its time limit. And where a site refuses to put jobs back, only the batch script submits a
successor. So an agent that is left runs the script's own lines for that (`hostless` in `job.sbatch`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from slurmddp.runs.folder import RunFolder


def put_back(folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Let the script see to the job if SLURM has lost its first node; returns when that is done, or seen.

    It may take a quarter of an hour, since SLURM takes its time: end the ranks before. Nothing is
    done in a local run, nor where SLURM's commands are not at hand (in a container).
    """
    has_slurm = shutil.which("scontrol", path=environ.get("PATH")) and not environ.get("SLURMDDP_EMULATED")
    if not has_slurm or not folder.script_file.exists():
        return
    subprocess.run(["bash", str(folder.script_file), "hostless"], stdin=subprocess.DEVNULL, env=dict(environ))
