"""Submission of prepared runs as one array of SLURM: each element trains in a run folder of its own.

The script of an array lies in a hidden folder beside the run folders, `.NAME.N`. A link beside the script,
named after the index of an element, leads to the run folder of the element. The script and the commands find
the run of an element by this link, even if the answer of sbatch was lost.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurmddp.launchers.submit.sbatch import site_options
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.options import sbatch_options
from slurmddp.slurm.script import render_array
from slurmddp.spec import Job

SCRIPT = "job.sbatch"
_OF_ONE_RUN = ("job-name", "output")
"""Options of sbatch whose values differ between runs and that an array has one of."""


def groups(jobs: Iterable[Job], most: int) -> list[list[Job]]:
    """Return the jobs in groups of at most `most` that fit into one array: sbatch gets the same options.

    A job that submitit submits is a group of its own.

    Args:
        jobs: the jobs, in the order of their indexes.
        most: the number of elements that an array may have.
    """
    alike: dict[object, list[Job]] = {}
    for job in jobs:
        key: object = job.run_dir
        if job.launcher == "slurm" and job.submitter == "sbatch":
            shared = {name: one for name, one in sbatch_options(job).items() if name not in _OF_ONE_RUN}
            key = repr((shared, job.array_parallelism, job.cluster))
        alike.setdefault(key, []).append(job)
    most = max(most, 1)
    return [some[start : start + most] for some in alike.values() for start in range(0, len(some), most)]


def free_folder(runs_dir: Path, name: str) -> Path:
    """Return the first `.NAME.N` that does not exist in the folder of all runs."""
    number = 1
    while (folder := runs_dir / f".{name}.{number}").exists():
        number += 1
    return folder


def submit(jobs: Sequence[Job], folder: Path, slurm: SlurmClient) -> list[str]:
    """Write the folder of an array, submit the array, record each element in its run; return the ids.

    Args:
        jobs: the jobs of prepared runs, in the order of their indexes.
        folder: the folder of the array; it must not exist.
        slurm: the SLURM to submit to.

    Raises:
        SlurmError: SLURM refused the array, and nothing is left of it; or SLURM did not answer
            (`may_be_queued`), and the folder stays.
    """
    folder.mkdir(mode=0o700)
    try:
        for index, job in enumerate(jobs):
            (folder / str(index)).symlink_to(Path("..", job.run_dir.name))
        script = folder / SCRIPT
        script.write_text(render_array(jobs, folder), encoding="utf-8")
        array = slurm.submit(script, token=_new_token(), options=site_options(jobs, script, slurm))
    except BaseException as error:
        if isinstance(error, Exception) and not getattr(error, "may_be_queued", False):
            shutil.rmtree(folder)
        raise
    ids = [f"{array}_{index}" for index in range(len(jobs))]
    for job, job_id in zip(jobs, ids, strict=True):
        RunFolder(job.run_dir).add_event("submitted", job_id=job_id, submitter="sbatch")
    return ids


def remove_left_over(runs_dir: Path) -> None:
    """Remove the folders of arrays of which no run folder is left.

    Args:
        runs_dir: the folder of all runs.
    """
    for script in runs_dir.glob(f".*/{SCRIPT}"):
        links = [path for path in script.parent.iterdir() if path.name.isdecimal() and path.is_symlink()]
        if links and not any(link.exists() for link in links):
            shutil.rmtree(script.parent, ignore_errors=True)


def _new_token() -> str:
    """Return a unique word for the comment of an array. It names no run, for the elements share it."""
    return f"slurmddp:array-{secrets.token_hex(6)}"
