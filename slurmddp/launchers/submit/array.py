"""Submit prepared runs as one array of SLURM: each element trains in a separate run folder.

The script of an array is in a hidden folder beside the run folders, `.NAME.N`. The file `elements` beside the
script names the run folders in the order of the indexes. The script and the commands find the run of an
element by this file, even if sbatch's answer was lost. `element/` holds the code, which is equal for all
runs. A new run copies the code at its first start. A run that existed before gets it at the submission.
"""

from __future__ import annotations

import re
import resource
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from slurmddp.errors import SlurmddpError
from slurmddp.host.free_name import first_free
from slurmddp.host.process import OpenFiles
from slurmddp.launchers.submit.sbatch import site_options
from slurmddp.runs.folder.create import check_syntax, prepare, write_code_of_array
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import END_OF_RUN_NAME, Job
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.job_script import ELEMENT, ELEMENTS, elements
from slurmddp.slurm.limits.queries import max_array_size
from slurmddp.slurm.sbatch_options import sbatch_options
from slurmddp.slurm.script import render, render_array

_OF_ONE_RUN = ("job-name", "output")
"""Options of sbatch that may differ between the runs of an array; the array's script sets its own values."""
_OF_LENGTH = ("train", "program")
"""The configuration's sections with the keys that extend a finished run: more steps, or other arguments."""
_OTHER_FILES = 256
"""Number of open files that a process needs in addition to the locks of runs."""


def longest_array(slurm: SlurmClient) -> int:
    """Return how many elements an array may have, by SLURM's limit and by the limit of open files.

    While an array is submitted, the lock of each element is an open file.
    """
    open_files = OpenFiles.allow_most()
    longest = max_array_size(slurm)
    if open_files == resource.RLIM_INFINITY:
        return longest
    return min(longest, open_files - _OTHER_FILES)


def groups(jobs: Iterable[Job], max_elements: int) -> list[list[Job]]:
    """Divide jobs into groups, each of which is submitted as one array.

    All jobs of a group have the same options of sbatch. A job that submitit submits is a group alone. SLURM
    limits each array separately, so `array_parallelism` is divided among the groups.

    Args:
        jobs: the jobs, in the order of their indexes.
        max_elements: the largest number of elements that an array may have.
    """
    jobs_by_options: dict[object, list[Job]] = {}
    for job in jobs:
        key: object = job.run_dir
        if job.launcher == "slurm" and job.submitter == "sbatch":
            options = sbatch_options(job).items()
            shared = {name: value for name, value in options if name not in _OF_ONE_RUN}
            key = repr((shared, job.array_parallelism, job.cluster))
        jobs_by_options.setdefault(key, []).append(job)

    size = max(max_elements, 1)
    arrays = [
        alike[start : start + size]
        for alike in jobs_by_options.values()
        for start in range(0, len(alike), size)
    ]
    bounds = [job.array_parallelism for array in arrays for job in array if job.array_parallelism]
    if not bounds or len(arrays) == 1:
        return arrays

    shares = shared_bound(min(bounds), [sum(map(_is_unfinished, array)) for array in arrays])
    return [
        [replace(job, array_parallelism=share) for job in array]
        for array, share in zip(arrays, shares, strict=True)
    ]


def _is_unfinished(job: Job) -> bool:
    """Return whether a job has work to do: its run has not finished, or its configuration extends it."""
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
    """Return how many jobs of each group may run at once, so that at most `bound` jobs of all groups do.

    Each group gets at least one, also beyond `bound`, because an array can't be limited to 0 jobs at once.

    Args:
        bound: the number for all groups together.
        sizes: the number of jobs of each group that will run.
    """
    shares = [1] * len(sizes)
    for _ in range(bound - sum(size > 0 for size in sizes)):
        waiting = [group for group, size in enumerate(sizes) if shares[group] < size]
        if not waiting:
            break

        # The group with the most jobs per share would take the longest, so it gets one more.
        longest = max(waiting, key=lambda group: sizes[group] / shares[group])
        shares[longest] += 1
    return shares


def free_folder(runs_dir: Path, name: str) -> Path:
    """Return the first path `.NAME.N` that does not exist in the folder of all runs."""
    return runs_dir / first_free(f".{name}.", lambda name: (runs_dir / name).exists())


def submit(
    jobs: Sequence[Job],
    folder: Path,
    slurm: SlurmClient,
    *,
    new: Collection[Path],
    say: Callable[[str], object],
) -> list[str]:
    """Write the folder of an array, submit the array, and record each job in its run; return the job ids.

    Args:
        jobs: the jobs of the runs, in the order of their indexes.
        folder: the folder of the array; it must not exist.
        slurm: the client of the site's SLURM.
        new: the run folders that `create` has just written. All other runs get the files of this submission.
        say: prints a sentence about each run whose code has changed.

    Raises:
        SlurmError: SLURM refused the array, and its folder is removed; or SLURM did not answer
            (`may_be_queued`), and the folder stays.
    """
    folder.mkdir(mode=0o700)
    try:
        names = "".join(f"{job.run_dir.name}\n" for job in jobs)
        (folder / ELEMENTS).write_text(names, encoding="utf-8", errors="surrogateescape")
        # One check is enough, because all jobs have the same `setup` lines.
        check_syntax(render(jobs[0]))
        code = write_code_of_array(folder / ELEMENT, jobs[0], [job.run_dir for job in jobs])
        for job in jobs:
            if job.run_dir not in new:
                prepare(job, render(job), say, code=code)

        script = RunFolder(folder).script_file
        script.write_text(render_array(jobs, folder), encoding="utf-8")
        array = slurm.submit(script, token=_new_token(), options=site_options(jobs, script, slurm))
    except BaseException as error:
        # Keep the folder if the array may be queued: without an answer of SLURM, and after Ctrl-C.
        if isinstance(error, Exception) and not getattr(error, "may_be_queued", False):
            shutil.rmtree(folder)
        raise

    ids = [f"{array}_{index}" for index in range(len(jobs))]
    for job, job_id in zip(jobs, ids, strict=True):
        RunFolder(job.run_dir).add_event("submitted", job_id=job_id, submitter="sbatch")
    return ids


def remove_left_over(runs_dir: Path) -> None:
    """Remove the folders of arrays whose run folders have all been removed.

    Args:
        runs_dir: the folder of all runs.
    """
    for file in runs_dir.glob(f".*/{ELEMENTS}"):
        folder = file.parent
        names = elements(str(folder))
        # Check that this is the folder of an array: other hidden folders may contain a file of that name.
        is_array = (folder / ELEMENT).is_dir() and all(map(_is_name_of_run, names))
        if is_array and names and not any((runs_dir / name).exists() for name in names):
            shutil.rmtree(folder, ignore_errors=True)


def _is_name_of_run(name: str) -> bool:
    return re.fullmatch(rf"[^/]+{END_OF_RUN_NAME}", name) is not None


def _new_token() -> str:
    """Return a unique argument for the script of an array, by which its jobs are found in the queue.

    The argument names no run, because all elements share it.
    """
    return f"slurmddp:array-{secrets.token_hex(6)}"
