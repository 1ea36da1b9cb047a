"""Submission of prepared runs as one array of SLURM: each element trains in a run folder of its own.

The script of an array lies in a hidden folder beside the run folders, `.NAME.N`. The file `elements` beside
the script names the run folders in the order of the indexes. The script and the commands find the run of an
element by this file, even if the answer of sbatch was lost. `element/` holds the code, which is equal for all
runs. A new run copies it at its first start, and a run that existed before gets it at the submission.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from slurmddp.errors import SlurmddpError
from slurmddp.host.free_name import first_free
from slurmddp.launchers.submit.sbatch import site_options
from slurmddp.runs.folder.create import check_syntax, prepare, write_code_of_array
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import END_OF_RUN_NAME, Job
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.job_script import ELEMENT, ELEMENTS, elements
from slurmddp.slurm.options import sbatch_options
from slurmddp.slurm.script import render, render_array

_OF_ONE_RUN = ("job-name", "output")
"""Options of sbatch whose values differ between runs and that an array has one of."""
_OF_LENGTH = ("train", "program")
"""The sections with the keys that extend a finished run: its length, or the arguments of its script."""


def groups(jobs: Iterable[Job], most: int) -> list[list[Job]]:
    """Return the jobs in groups of at most `most` that fit into one array: sbatch gets the same options.

    A job that submitit submits is a group of its own. The groups share `array_parallelism`, because SLURM
    bounds each array alone.

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
    found = [some[start : start + most] for some in alike.values() for start in range(0, len(some), most)]
    bounds = [job.array_parallelism for some in found for job in some if job.array_parallelism]
    if not bounds or len(found) == 1:
        return found
    shares = shared_bound(min(bounds), [sum(map(_is_left, some)) for some in found])
    return [
        [replace(job, array_parallelism=share) for job in some]
        for some, share in zip(found, shares, strict=True)
    ]


def _is_left(job: Job) -> bool:
    """Return whether a job has something to do: its run has not finished, or is to train longer."""
    folder = RunFolder(job.run_dir)
    try:
        newest = read_history(folder).newest
        if newest is None or newest.outcome != "finished":
            return True
        stored = folder.config()
    except (SlurmddpError, OSError):
        return True
    return any(stored.get(section) != job.program.config.get(section) for section in _OF_LENGTH)


def shared_bound(bound: int, sizes: Sequence[int]) -> list[int]:
    """Return how many jobs of each group may run at once, so that at most `bound` of all run at once.

    Each group gets one at least: SLURM has no array that runs none.

    Args:
        bound: the number for all groups together.
        sizes: the number of jobs of each group that will run.
    """
    shares = [1] * len(sizes)
    for _ in range(bound - sum(size > 0 for size in sizes)):
        waiting = [place for place, size in enumerate(sizes) if shares[place] < size]
        if not waiting:
            break
        # The group that would otherwise take the longest.
        shares[max(waiting, key=lambda place: sizes[place] / shares[place])] += 1
    return shares


def free_folder(runs_dir: Path, name: str) -> Path:
    """Return the first `.NAME.N` that does not exist in the folder of all runs."""
    return runs_dir / first_free(f".{name}.", lambda name: (runs_dir / name).exists())


def submit(
    jobs: Sequence[Job],
    folder: Path,
    slurm: SlurmClient,
    *,
    new: Collection[Path],
    say: Callable[[str], object],
) -> list[str]:
    """Write the folder of an array, submit the array, record each element in its run; return the ids.

    Args:
        jobs: the jobs of the runs, in the order of their indexes.
        folder: the folder of the array; it must not exist.
        slurm: the SLURM to submit to.
        new: the run folders that `create` has just written. All others get the files of this submission.
        say: called with a sentence about each run whose code has changed.

    Raises:
        SlurmError: SLURM refused the array, and nothing is left of it; or SLURM did not answer
            (`may_be_queued`), and the folder stays.
    """
    folder.mkdir(mode=0o700)
    try:
        names = "".join(f"{job.run_dir.name}\n" for job in jobs)
        (folder / ELEMENTS).write_text(names, encoding="utf-8", errors="surrogateescape")
        check_syntax(render(jobs[0]))  # All have the same `setup` lines.
        code = write_code_of_array(folder / ELEMENT, jobs[0], [job.run_dir for job in jobs])
        for job in jobs:
            if job.run_dir not in new:
                prepare(job, render(job), say, code=code)
        script = RunFolder(folder).script_file
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
    for file in runs_dir.glob(f".*/{ELEMENTS}"):
        names = elements(str(file.parent))
        # A person may keep other files in this folder, even a hidden folder with a file of that name.
        is_array = (file.parent / ELEMENT).is_dir() and all(map(_is_name_of_run, names))
        if is_array and names and not any((runs_dir / name).exists() for name in names):
            shutil.rmtree(file.parent, ignore_errors=True)


def _is_name_of_run(name: str) -> bool:
    return re.fullmatch(rf"[^/]+{END_OF_RUN_NAME}", name) is not None


def _new_token() -> str:
    """Return a unique argument for the script of an array. It names no run, for the elements share it."""
    return f"slurmddp:array-{secrets.token_hex(6)}"
