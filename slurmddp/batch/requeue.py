"""Requeue the job, or submit a new job in its place; each at most once."""

from __future__ import annotations

from collections.abc import Sequence

from slurmddp.batch import requeue_policy
from slurmddp.batch.attempt import said_if_not_recorded
from slurmddp.batch.slurm_job import SlurmJob
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.command_output import QueuedJob, find_submitted, parse_job_id

_DELAYS_S = (0, 5, 15)
_HOLD = "#SBATCH --hold"


def requeue(job: SlurmJob) -> bool:
    """Requeue the job; return whether SLURM has done so, even if its answer was lost."""
    for delay in (1, 2, 3):
        if job.is_forgotten:  # The request would requeue the other job.
            job.say(f"SLURM has given the id {job.id} to another job, so this one can't be requeued.")
            return False
        if job.fate == requeue_policy.REQUEUED:
            return True
        answer = job.scontrol("requeue", job.id)
        if answer.code == 0:
            return True
        job.say(answer.err.strip())
        job.sleep(delay)
        job.poll_patiently()
    return job.fate == requeue_policy.REQUEUED


def resubmit(folder: RunFolder, job: SlurmJob, attempt: int, exclude: str) -> bool:
    """Submit a new job into the same run folder; return whether SLURM has it.

    A begin time and a hold delay the first job of a run only, as they do where SLURM requeues it.

    A token stands among the arguments of the script. The batch step finds the job by it if sbatch queued the
    job and its answer was lost.
    """
    token = f"slurmddp:after-{job.id}-{attempt}"
    options = ["--begin=now"]
    options += [f"--exclude={exclude}"] if exclude else []
    options += [] if job.is_forgotten else [f"--dependency=afterany:{job.id}"]
    for delay in _DELAYS_S:
        if delay:
            job.sleep(delay)
        queue = job.queue()
        if queue is None and delay:
            continue  # The sbatch before may have queued the job all the same.
        new = _find(job, queue or [], folder, token)
        if new is None:
            answer = job.sbatch("--parsable", *options, str(folder.script_file), "resubmitted", token)
            new = parse_job_id(answer.out) if answer.code == 0 else None
            if new is None:
                job.say((answer.err or answer.out).strip())
                continue
        with said_if_not_recorded("submitted", job.say):
            folder.add_event("submitted", job_id=new, submitter="sbatch", resubmitted=True)
        if _is_held(folder):
            released = job.scontrol("release", new)
            if released.code:
                job.say(f"Job {new} stays held: {released.err.strip()}")
        return True
    return False


def _is_held(folder: RunFolder) -> bool:
    """Return whether the script asks SLURM to hold its job, which no option of sbatch revokes."""
    try:
        return _HOLD in folder.script_file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False


def _find(job: SlurmJob, queue: Sequence[QueuedJob], folder: RunFolder, token: str) -> str | None:
    """Return the job in the queue that has `token` among the arguments of its script."""

    def facts_of(job_id: str) -> str:
        answer = job.scontrol("-o", "show", "job", job_id)
        return answer.out if answer.code == 0 else ""

    others = [queued for queued in queue if queued.job_id != job.id]
    # The new job waits for the end of this one.
    waiting = {queued.number for queued in others if queued.state == "PENDING"}
    return find_submitted(others, folder.script_file, token, waiting - _recorded(folder), facts_of)


def _recorded(folder: RunFolder) -> set[str]:
    """Return the ids of all jobs that the run folder names."""
    return {str(event.get("job_id")) for event in folder.readable_events()}


def leave_queue(job: SlurmJob) -> None:
    """Cancel the job of a run that is over if SLURM has requeued it."""
    if job.fate in (requeue_policy.PREEMPTED, requeue_policy.NODE_FAIL):
        job.poll_patiently()  # SLURM may have put it back since.
    if job.fate == requeue_policy.REQUEUED:
        job.scancel()
