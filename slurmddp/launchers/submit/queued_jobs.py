"""Find the jobs of runs that SLURM still has, even if no run folder names them; cancel or adopt them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurmddp.errors import RunStateError, SlurmError
from slurmddp.runs.folder.history import History, read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.states import ACTIVE, PENDING, JobState


def live_jobs(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[dict[str, JobState]]:
    """Return the jobs of each run that wait or run in SLURM, by job id.

    The result includes jobs that the run folder does not name.
    """
    jobs_by_path = slurm.jobs_of_each([folder.path for folder in folders])
    return [_live(jobs_by_path[folder.path]) for folder in folders]


def _live(jobs: Mapping[str, JobState]) -> dict[str, JobState]:
    """Return the `jobs` that wait or run, by job id."""
    live_states = (PENDING | ACTIVE) - {"COMPLETING"}
    return {job_id: job for job_id, job in jobs.items() if job.state in live_states}


def leftovers_of_each(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[list[str]]:
    """Return the ids of the jobs that SLURM still has for each run of `folders`, all of which have ended.

    These are the jobs that wait, and the jobs that the run folder does not name. One query asks SLURM for all
    runs. Without an answer the lists are empty.
    """
    try:
        jobs_of_runs = live_jobs(folders, slurm) if folders else []
    except SlurmError:
        return [[] for _ in folders]

    return [_leftovers(folder, jobs) for folder, jobs in zip(folders, jobs_of_runs, strict=True)]


def _leftovers(folder: RunFolder, live: Mapping[str, JobState]) -> list[str]:
    named = named_jobs(read_history(folder)) if live else set()
    return [job_id for job_id, job in live.items() if job.pending or job_id not in named]


def settle(folder: RunFolder, slurm: SlurmClient, say: Callable[[str], None]) -> str | None:
    """Cancel or adopt the jobs of one run as `settle_each` does; return the adopted job's id, or None."""
    return settle_each([folder], slurm, say).get(folder.path)


def settle_each(
    folders: Sequence[RunFolder], slurm: SlurmClient, say: Callable[[str], None]
) -> dict[Path, str]:
    """Cancel or adopt the jobs that SLURM still has although the records of their runs have ended.

    A waiting job that the run folder names, as after a requeue, is cancelled. A job that the run folder does
    not name is adopted: its submission is recorded.

    Args:
        folders: the run folders.
        slurm: the client of the site's SLURM.
        say: prints a sentence about each cancelled job.

    Returns:
        The id of the adopted job of each run that has one, which makes another submission unnecessary.

    Raises:
        RunStateError: a job of the run still holds nodes.
        SlurmError: SLURM does not answer, so nothing is submitted.
    """
    try:
        jobs_by_path = slurm.jobs_of_each([folder.path for folder in folders])
    except SlurmError as error:
        raise SlurmError(f"{error.message} Nothing was submitted.", hint=error.hint) from error

    adopted = {
        folder.path: _settle(folder, _live(jobs_by_path[folder.path]), slurm, say) for folder in folders
    }
    return {path: job_id for path, job_id in adopted.items() if job_id is not None}


def _settle(
    folder: RunFolder, live: Mapping[str, JobState], slurm: SlurmClient, say: Callable[[str], None]
) -> str | None:
    history = read_history(folder)
    for job_id, job in live.items():
        if job_id not in named_jobs(history):
            folder.add_event("submitted", job_id=job_id, submitter="sbatch")
            return job_id
        if job.pending:
            slurm.cancel(job_id)
            say(f"Job {job_id} of an earlier attempt was still in the queue; it was cancelled.")
        elif job_id in history.open_jobs:
            raise RunStateError(
                f"Job {job_id} of {folder.name} still runs.",
                hint=f"End it with `slurmddp cancel {folder.name}`; nothing was submitted.",
            )
    return None


def named_jobs(history: History) -> set[str | None]:
    """Return the ids of all jobs in the record of a run; an attempt without a job adds None."""
    return {history.job_id, *history.open_jobs, *(attempt.job_id for attempt in history.attempts)}
