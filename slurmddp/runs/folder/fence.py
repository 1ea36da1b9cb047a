"""Who may write to a run: the attempt that was claimed last, and no earlier one that still lives.

SLURM requeues a job that has lost a node, but the processes on that node may live on: a cut link is enough.
The number of an attempt is its token, and the folder that claims it under `logs/` is what older ones find.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.environments.names import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmddp.errors import SupersededError
from slurmddp.runs.folder.layout import RunFolder, is_there


def superseded(folder: RunFolder, attempt: int) -> bool:
    """Whether a later attempt of the run has begun; a folder that can't be read says no."""
    return is_there(folder.log_dir(attempt + 1))


def refuse_superseded(environ: Mapping[str, str]) -> None:
    """Raise SupersededError in a process of an attempt after which another one has begun."""
    run_dir, attempt = environ.get(RUN_DIR_VARIABLE), environ.get(ATTEMPT_VARIABLE, "")
    if run_dir and attempt.isdecimal() and superseded(RunFolder(run_dir), int(attempt)):
        raise SupersededError(
            f"Attempt {attempt} of {RunFolder(run_dir).name} still runs, though a later one has begun: "
            "it stops here and writes nothing more.",
            hint="SLURM had lost one of its nodes, or the run was started a second time.",
        )
