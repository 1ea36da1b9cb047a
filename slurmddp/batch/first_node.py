"""End an attempt whose batch script is gone, alone or with the first node; an agent that is left runs this.

SLURM leaves a job alone that tolerates the loss of nodes, even if the job lost its first node. Such a job
would hold its nodes until the time limit. A job whose script was killed has failed for SLURM.
"""

from __future__ import annotations

import re

from slurmddp.batch import requeue_policy
from slurmddp.batch.attempt import Attempt
from slurmddp.batch.end import AttemptEnd
from slurmddp.batch.slurm_job import SlurmJob, hosts_of
from slurmddp.errors import EXIT_FAILED, EXIT_STOPPED

_POLLS, _DELAY_S = 90, 10.0
"""A quarter of an hour: SLURM takes its time until it gives a node up."""
_DOWN = re.compile(r"DOWN|FAIL|ERROR|NOT_RESPONDING|\*")
NODE, SCRIPT = "node", "script"


def first_node_lost(attempt: Attempt, job: SlurmJob) -> None:
    """End the attempt as its batch script would have, if that is gone; at most one agent does so."""
    asked = attempt.log_dir / "first-node-lost"
    try:
        asked.mkdir()
    except OSError:
        return  # Another agent asks.
    first = job.hosts[0] if job.hosts else ""
    lost = _find_lost(attempt, job, first)
    if not lost:
        asked.rmdir()  # It may be lost later.
        return
    end, left = AttemptEnd(attempt, job), attempt.exit_code_of(0)
    # SLURM ended the ranks, unless they had ended before the script was killed alone.
    is_by_slurm = lost == NODE or left == EXIT_STOPPED
    job.fate = requeue_policy.NODE_FAIL if is_by_slurm else requeue_policy.RUNNING
    if lost == NODE:
        job.say(f"SLURM has lost {first}, on which the batch script of job {job.id} ran.")
        held = hosts_of(job.facts.get("NodeList", ""))
        # A node that was set DOWN by hand may be back at once, and srun may not have reported it yet.
        end.note_failed_nodes(silent=[first], replaced=[first] if held and first not in held else [])
    else:
        job.say(f"The batch script of job {job.id} on {first} was killed.")
    done = end.carry_out(
        EXIT_FAILED if left is None else left,
        attempt.has_progressed(),
        lost={0: first} if left is None else {},
        # A job that SLURM ends takes no exclusion, and the lost node may still hold it.
        may_requeue=lost == SCRIPT or job.facts.get("JobState") == "RUNNING",
    )
    if attempt.settings.tolerates_node_loss and done.next != "requeue" and done.outcome != "superseded":
        job.scancel()  # Nothing else would end it before its time limit.


def _find_lost(attempt: Attempt, job: SlurmJob, first: str) -> str:
    """Return `node` or `script` if this job's batch script is gone with its node or alone; empty if not."""
    for _ in range(_POLLS):
        job.poll()
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
        return lost if job.script_was_killed and attempt.recorded_end() is None else ""
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
