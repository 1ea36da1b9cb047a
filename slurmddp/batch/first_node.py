"""When the first node is lost, and the batch script with it, or the script alone: another agent runs this.

SLURM leaves a job that may lose nodes alone, also when it lost its first: nobody would end it before its time
limit. A job whose script was killed has failed for SLURM.
"""

from __future__ import annotations

import re

from slurmddp.batch import outcome
from slurmddp.batch.attempt import Attempt, events_of
from slurmddp.batch.exclusions import Exclusions
from slurmddp.batch.requeue import resubmit
from slurmddp.batch.slurm_job import SlurmJob, hosts_of
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED

_PATIENCE, _DELAY_S = 90, 10.0
"""A quarter of an hour: SLURM takes its time until it gives a node up."""
_ENDED_BY_SLURM = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")
_DOWN = re.compile(r"DOWN|FAIL|ERROR|NOT_RESPONDING|\*")
NODE, SCRIPT = "node", "script"


def first_node_lost(attempt: Attempt, job: SlurmJob) -> None:
    """Put the job back, or submit a new one, if its batch script is gone; at most one agent does so."""
    asked = attempt.log_dir / "first-node-lost"
    try:
        asked.mkdir()
    except OSError:
        return  # Another agent asks.
    first = job.hosts[0] if job.hosts else ""
    lost = _what_is_lost(attempt, job, first)
    if not lost:
        asked.rmdir()  # It may be lost later.
        return
    folder, settings = attempt.folder, attempt.settings
    again = settings.requeue and not folder.stop_file.exists() and not folder.cancelled_file.exists()
    exclusions = Exclusions(
        folder, job, began=attempt.began, hours=settings.exclude_failed_h, persons=settings.exclude
    )
    if lost == SCRIPT:
        again = _record_end(attempt, job, first, again)
    else:
        _note_first_node(attempt, job, first, exclusions)
    if again and _run_again(attempt, job, lost, exclusions):
        return
    if settings.tolerates_node_loss:
        job.scancel()  # Nothing else would end it before its time limit.


def _what_is_lost(attempt: Attempt, job: SlurmJob, first: str) -> str:
    """Return `node` or `script` if this job's batch script is gone with its node or alone; empty if not."""
    for _ in range(_PATIENCE):
        job.look()
        lost = _judge(attempt, job, first)
        if lost is not None:
            return lost
        is_young = job.environ.get("SLURM_NODEID") == "0" and job.facts.get("JobState") == "RUNNING"
        job.sleep(1.0 if is_young else _DELAY_S)
    return ""


def _judge(attempt: Attempt, job: SlurmJob, first: str) -> str | None:
    """Return what is lost, empty for nothing; None if SLURM may not know yet."""
    state = job.facts.get("JobState", "")
    if not state:
        return None  # The controller is away.
    if job.restarts != job.restart_count or state not in ("RUNNING", "COMPLETING", "FAILED"):
        return ""
    if state != "RUNNING":
        # SLURM ends a job whose script was killed. A script that ends by itself records the end before.
        lost = SCRIPT if attempt.exit_code_of(0) is not None else NODE
        is_killed = job.facts.get("Reason", "").startswith(_ENDED_BY_SLURM)
        return lost if is_killed and not _has_end(attempt) else ""
    if job.environ.get("SLURM_NODEID") == "0":
        return None  # SLURM has not seen yet that the script is gone.
    if not attempt.settings.tolerates_node_loss and job.facts.get("Requeue") == "1":
        return ""  # SLURM ends the job and puts it back.
    held = hosts_of(job.facts.get("NodeList", ""))
    if held and first not in held:
        return NODE  # SLURM took the node from the job.
    shown = job.nodes(first)
    if not job.unanswering(shown):
        return ""  # Only the agent there has ended, or this node was cut off.
    return NODE if _DOWN.search(shown[0].get("State", "")) else None


def _has_end(attempt: Attempt) -> bool:
    ended = (one for one in events_of(attempt.folder) if one.get("event") == "ended")
    return any(one.get("attempt") == attempt.number for one in ended)


def _record_end(attempt: Attempt, job: SlurmJob, first: str, again: bool) -> bool:
    """Record the end of an attempt whose script was killed alone; return whether the run goes on."""
    code = attempt.exit_code_of(0)
    code = EXIT_FAILED if code is None else code
    names = {EXIT_FINISHED: "finished", EXIT_STOPPED: "stopped"}
    again = again and code == EXIT_STOPPED
    decision = outcome.Outcome(names.get(code, "failed"), "requeue" if again else "none", code)
    job.say(
        f"The batch script of job {job.id} on {first} was killed. "
        f"Attempt {attempt.number}: {decision.outcome}, next: {decision.next}."
    )
    attempt.record_end(decision, has_progressed=False)
    return again


def _note_first_node(attempt: Attempt, job: SlurmJob, first: str, exclusions: Exclusions) -> None:
    job.say(f"SLURM has lost {first}, on which the batch script of job {job.id} ran.")
    attempt.note_lost(0, first)
    left = hosts_of(job.facts.get("NodeList", ""))
    exclusions.note_failed(
        job.node_list,
        began=attempt.began,
        batch_log=attempt.log_dir / "batch.log",
        silent=[first],
        # A node that was set DOWN by hand may be back at once, and srun may not have told of it yet.
        replaced=[first] if left and first not in left else [],
    )
    exclusions.choose()


def _run_again(attempt: Attempt, job: SlurmJob, lost: str, exclusions: Exclusions) -> bool:
    """Put the job back or submit a new one; return whether SLURM puts it back, so that it must stay.

    A job that SLURM ends takes no exclusion, and its old node may still hold it: a new job goes elsewhere.
    """
    may_requeue = lost == SCRIPT or job.facts.get("JobState") == "RUNNING"
    if job.facts.get("Requeue") == "1" and may_requeue:
        answer = job.scontrol("requeue", job.id)
        if answer.code == 0:
            exclusions.tell()
            return True
        job.say(answer.err.strip())
    if not resubmit(attempt.folder, job, attempt.number, exclusions.choice):
        name = attempt.folder.path.name
        job.say(f"SLURM takes no new job either; go on with: slurmddp resume {name}")
    return False
