"""Who may write to a run: the attempt that was claimed last, and no earlier one that still lives.

SLURM requeues a job that has lost a node, but the processes on that node may live on: a cut link is enough.
The number of an attempt is its token, and the folder that claims it under `logs/` is what older ones find.
"""

from __future__ import annotations

from slurmddp.runs.folder.layout import RunFolder, is_there


def superseded(folder: RunFolder, attempt: int) -> bool:
    """Whether a later attempt of the run has begun; a folder that can't be read says no."""
    return is_there(folder.log_dir(attempt + 1))
