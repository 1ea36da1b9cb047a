"""Fencing: only the newest attempt of a run may write, although an earlier attempt may still run.

SLURM requeues a job that has lost a node, but after a cut link the processes on that node still run. The
number of an attempt is its fencing token. Earlier attempts find the folder of a later attempt under `logs/`.
"""

from __future__ import annotations

from slurmddp.runs.folder.layout import RunFolder, is_there


def superseded(folder: RunFolder, attempt: int) -> bool:
    """Return whether a later attempt of the run has started; False if the folder can't be read."""
    return is_there(folder.log_dir(attempt + 1))


def is_over(folder: RunFolder, attempt: int) -> bool:
    """Return whether a person has ended the run, or a later attempt has started."""
    marks = (folder.stop_file, folder.cancelled_file)
    return any(map(is_there, marks)) or superseded(folder, attempt)
