"""Find the run to which a job belongs by the job's script; used on the login side and in the batch step.

SLURM repeats job ids: another cluster, a new sandbox, and a slurmctld that lost its state or passed its
largest job id give ids that earlier jobs had. So the id alone does not show that a job belongs to a run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path

from slurmddp.host.regular_file import read_regular

ELEMENTS = "elements"
"""A file beside the script of an array. Line INDEX + 1 is the name of the run folder of element INDEX."""
ELEMENT = "element"
"""A folder beside the script of an array, with the files that are equal for all runs of the array."""


def job_name(name: str) -> str:
    """Return `name` with dashes in place of characters that SLURM's tables and file patterns don't allow."""
    return re.sub(r"[^A-Za-z0-9._=+]+", "-", name).strip("-")[:100] or "slurmddp"


def script_of(job_id: str, script: str) -> str:
    """Return the script of a job; for an element of a sweep's array return the script in its run folder.

    The run folders of an array are beside the folder of the array's script. The file `elements` in this
    folder lists their names.
    """
    array, _, index = job_id.rpartition("_")
    folder, _, name = script.rpartition("/")
    if not array or not index.isdecimal() or not folder.startswith("/"):
        return script

    run = "".join(elements(folder)[int(index) : int(index) + 1])
    if not run:
        return script
    return f"{folder.rpartition('/')[0]}/{run}/{name}"


def elements(folder: str) -> Sequence[str]:
    """Return the names of the run folders of an array, by index; empty if `folder` belongs to no array."""
    file = f"{folder}/{ELEMENTS}"
    try:
        # `Path.stat` would be slower, which matters for arrays with thousands of elements.
        status = os.stat(file)  # noqa: PTH116
        return _names(file, status.st_ino, status.st_mtime_ns)
    except (OSError, ValueError):
        return ()


@lru_cache(maxsize=64)
def _names(file: str, *_version: int) -> Sequence[str]:
    """Return the lines of a file; read it once for all elements of an array.

    Args:
        file: the path of the file.
        _version: values that change when the file is replaced.
    """
    return read_regular(file).decode("utf-8", errors="surrogateescape").split("\n")[:-1]


def is_of_unread_array(job_id: str, script: str, run: Path) -> bool:
    """Return whether a job is an element of an array beside a run, and the array's file `elements` is lost.

    Without the file, nothing shows to which run such a job belongs. So it may belong to any run whose folder
    records its id.

    Args:
        job_id: the id of the job.
        script: the result of `script_of` for the job.
        run: the run folder.
    """
    folder = Path(script).parent
    is_of_array = "_" in job_id and folder.name.startswith(".")
    return is_of_array and os.path.realpath(folder.parent) == os.path.realpath(run.parent)


def may_be_of(names: Collection[str], run: str, script: str) -> bool:
    """Return whether a job may belong to a run: its token or script names the run, or SLURM shows neither.

    Args:
        names: the name of the run, and the name of its jobs.
        run: the run that the token among the script's arguments names; empty without such a token. The
            elements of an array share a token, and it names no run.
        script: the path of the job's script; empty if SLURM does not show it.
    """
    if run:
        return run in names
    return not script or not set(names).isdisjoint(Path(script).parts)
