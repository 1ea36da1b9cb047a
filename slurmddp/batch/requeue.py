"""Requeue the job, or submit a new job in its place; a lost reply of SLURM causes no second job."""

from __future__ import annotations

from collections.abc import Sequence

from slurmddp.batch import requeue_policy
from slurmddp.batch.attempt import log_write_error
from slurmddp.batch.slurm_job import SlurmJob
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.command_output import QueuedJob, find_submitted, parse_job_id

_REQUEUE_DELAYS_S = (1, 2, 3)
"""Seconds to wait after each refused request for a requeue."""
_SUBMIT_DELAYS_S = (0, 5, 15)
"""Seconds to wait before each submission."""
_HOLD = "#SBATCH --hold"


def requeue(job: SlurmJob) -> bool:
    """Requeue the job; return whether SLURM has requeued it, even if SLURM's reply was lost."""
    for delay in _REQUEUE_DELAYS_S:
        # `scontrol requeue` would requeue another job, which has this id now.
        if job.is_forgotten:
            job.log(f"SLURM has given the id {job.id} to another job, so this job can't be requeued.")
            return False
        if job.state == requeue_policy.REQUEUED:
            return True

        reply = job.scontrol("requeue", job.id)
        if reply.code == 0:
            return True

        job.log(reply.err.strip())
        job.sleep(delay)
        job.poll_patiently()

    return job.state == requeue_policy.REQUEUED


def resubmit(folder: RunFolder, job: SlurmJob, attempt: int, exclude: str) -> bool:
    """Submit a new job into the same run folder; return whether SLURM has queued it.

    The new job starts without the run's begin time (`--begin`) and hold (`--hold`): SLURM does not apply
    these to a requeued job either.

    One argument of the script is a token of this submission. If sbatch queued the job but its reply was lost,
    the batch step finds the job by this token.

    Args:
        folder: the run folder.
        job: the job that ends.
        attempt: the number of the attempt that ends.
        exclude: the nodes that the new job must not get; may be empty.
    """
    token = f"slurmddp:after-{job.id}-{attempt}"
    options = ["--begin=now"]
    if exclude:
        options.append(f"--exclude={exclude}")
    if not job.is_forgotten:
        options.append(f"--dependency=afterany:{job.id}")

    for delay in _SUBMIT_DELAYS_S:
        if delay:
            job.sleep(delay)
        queue = job.queue()
        # The last sbatch failed, but may have queued the job. Without the queue this is unknown, and another
        # sbatch could queue a second job.
        if queue is None and delay:
            continue

        new_job = _find(job, queue or [], folder, token)
        if new_job is None:
            reply = job.sbatch("--parsable", *options, str(folder.script_file), "resubmitted", token)
            new_job = parse_job_id(reply.out) if reply.code == 0 else None
            if new_job is None:
                job.log((reply.err or reply.out).strip())
                continue

        with log_write_error("The event `submitted`", job.log):
            folder.add_event("submitted", job_id=new_job, submitter="sbatch", resubmitted=True)
        if _is_held(folder):
            released = job.scontrol("release", new_job)
            if released.code:
                job.log(
                    f"Job {new_job} is held and could not be released: {released.err.strip()}. "
                    f"Release it with: scontrol release {new_job}"
                )
        return True

    return False


def _is_held(folder: RunFolder) -> bool:
    """Return whether the script has the option `--hold`, which no option of sbatch revokes."""
    try:
        return _HOLD in folder.script_file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False


def _find(job: SlurmJob, queue: Sequence[QueuedJob], folder: RunFolder, token: str) -> str | None:
    """Return the job in the queue that has `token` among the arguments of its script; None if none has it."""

    def facts_of(job_id: str) -> str:
        reply = job.scontrol("-o", "show", "job", job_id)
        return reply.out if reply.code == 0 else ""

    others = [queued for queued in queue if queued.job_id != job.id]
    # Only a pending job can be the new job, which waits for the end of this job.
    waiting = {queued.number for queued in others if queued.state == "PENDING"}
    return find_submitted(others, folder.script_file, token, waiting - _recorded(folder), facts_of)


def _recorded(folder: RunFolder) -> set[str]:
    """Return the ids of all jobs in the events of the run."""
    return {str(event.get("job_id")) for event in folder.readable_events()}


def leave_no_held_job(job: SlurmJob) -> None:
    """Keep SLURM from requeueing and holding a job whose batch script is about to fail.

    With an expedited requeue (`sbatch --requeue=expedite`) SLURM requeues each job whose batch script fails,
    and holds the job unless an epilog failed as well.
    """
    if not job.facts:
        job.poll()
    has_left = job.state in (requeue_policy.REQUEUED, requeue_policy.CANCELLED)
    if has_left or job.facts.get("ExpeditedRequeue") != "Yes":
        return

    reply = job.scontrol("update", f"JobId={job.id}", "Requeue=0")
    if reply.code:
        job.log(f"SLURM will hold this job; `scancel {job.id}` removes it: {reply.err.strip()}")


def leave_queue(job: SlurmJob) -> None:
    """If SLURM has requeued the job of a run that is over, cancel the job."""
    # SLURM may have requeued the job since the last query.
    if job.state in (requeue_policy.PREEMPTED, requeue_policy.NODE_FAIL):
        job.poll_patiently()
    if job.state == requeue_policy.REQUEUED:
        job.scancel()
