"""The run in which a job trains, by its comment and its script; for the login side and the batch step.

A new sandbox, another cluster, a controller that lost its state, and a controller past its largest number all
give ids that an earlier job had. So the id alone does not say that a job belongs to a run.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def script_of(job_id: str, script: str) -> str:
    """Return the path of a job's script, for an element of a sweep's array the script in its run folder.

    Beside the script of an array lies a link to each run folder, with the element's index as its name.
    """
    array, _, index = job_id.rpartition("_")
    link = Path(script).parent / index
    if not array or not link.is_symlink():
        return script
    run = Path(os.readlink(link)).name  # noqa: PTH115  # Python 3.8 has no `Path.readlink`.
    return str(link.parent.parent / run / Path(script).name)


def may_be_of(names: Collection[str], run: str, script: str) -> bool:
    """Return whether a job can be the job of a run.

    Args:
        names: the name of the run, and the name of its jobs.
        run: the run that the token in the job's comment names; empty without such a token. The elements of an
            array share a token, which names no run.
        script: the path of the job's script; empty if SLURM does not say.
    """
    if run:
        return run in names
    return not script or not set(names).isdisjoint(Path(script).parts)
