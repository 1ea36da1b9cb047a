"""Find the SLURM jobs of existing runs, and cancel them."""

from __future__ import annotations

from collections.abc import Sequence

from slurmddp.launchers.submit.queued_jobs import leftovers_of_each, live_jobs
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.slurm.client import SlurmClient


def with_leftovers(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[tuple[RunStatus, bool]]:
    """Return for each run its status, and whether it has, or may have, a job or a process.

    SLURM may still have a job of a run that has ended, for example a requeued one, which the run folder does
    not record. One query of SLURM finds these jobs for all runs.
    """
    all_statuses = statuses(folders, slurm)
    ended = [RunFolder(status.path) for status in all_statuses if not status.active]
    leftovers = zip(ended, leftovers_of_each(ended, slurm), strict=True)
    with_job = {folder.path for folder, jobs in leftovers if jobs}

    return [(status, status.active or status.path in with_job) for status in all_statuses]


def cancel_jobs(runs: Sequence[tuple[RunFolder, Sequence[str]]], slurm: SlurmClient) -> list[list[str]]:
    """Cancel the queued and running jobs of runs, and return their ids.

    Args:
        runs: each run, with the ids of the jobs that its folder records. Jobs that SLURM has, but the folder
            does not record, are cancelled as well.
        slurm: the client of the SLURM to which the runs belong.

    Returns:
        For each run, the ids of the cancelled jobs; empty if it had none.

    Raises:
        SlurmError: SLURM does not answer, or refuses.
    """
    named = [job_id for _, ids in runs for job_id in ids if not job_id.startswith("local")]
    known = slurm.jobs(named) if named else {}
    unrecorded = live_jobs([folder for folder, _ in runs], slurm)

    jobs_of_each: list[list[str]] = []
    for (folder, ids), live in zip(runs, unrecorded, strict=True):
        recorded = [job_id for job_id in ids if job_id in known and known[job_id].may_be_of(folder.path)]
        # squeue has forgotten a job with an error (see `JobState.error`), so there is nothing to cancel.
        open_jobs = [job_id for job_id in recorded if not known[job_id].terminal and not known[job_id].error]
        jobs_of_each.append([*open_jobs, *(job_id for job_id in live if job_id not in open_jobs)])

    wanted = [job_id for ids in jobs_of_each for job_id in ids]
    if wanted:
        slurm.cancel(*wanted)

    return jobs_of_each
