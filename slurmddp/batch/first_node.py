"""End an attempt whose batch script is gone, alone or with the first node; an agent that is left runs this.

SLURM does not end a job that tolerates the loss of nodes, even if the job lost its first node. Such a job
would hold its nodes until the time limit. A job whose script was killed has failed for SLURM.
"""

from __future__ import annotations

import re

from slurmddp.batch import requeue_policy
from slurmddp.batch.attempt import Attempt
from slurmddp.batch.end import AttemptEnd
from slurmddp.batch.slurm_job import SlurmJob, hosts_of
from slurmddp.errors import EXIT_FAILED, EXIT_STOPPED

_POLLS = 90
"""The largest number of queries about the job: with `_DELAY_S`, a quarter of an hour."""
_DELAY_S = 10.0
"""Seconds from one query to the next: SLURM may take minutes until it gives a node up."""
_SHORT_DELAY_S = 1.0
"""The same on the first node: it is up, and SLURM is about to see that the script there was killed."""
_DOWN = re.compile(r"DOWN|FAIL|ERROR|NOT_RESPONDING|\*")
"""States in which a node can't run an agent. A star marks a node that does not respond (sinfo(1))."""
NODE = "node"
"""The first node is lost, and the batch script with it."""
SCRIPT = "script"
"""The batch script was killed, and its node is up."""


def first_node_lost(attempt: Attempt, job: SlurmJob) -> None:
    """End the attempt as its batch script would have, if the script is gone; at most one agent does so."""
    mark = attempt.log_dir / "first-node-lost"
    try:
        mark.mkdir()
    except OSError:
        # Another agent does this.
        return

    first = job.hosts[0] if job.hosts else ""
    lost = _find_lost(attempt, job, first)
    if not lost:
        # The script may be lost later.
        mark.rmdir()
        return

    end = AttemptEnd(attempt, job)
    code = attempt.exit_code_of(0)
    lost_agents = {}
    if code is None:
        lost_agents[0] = first

    # SLURM ended the ranks, unless they had ended before the script was killed alone.
    if lost == NODE or code == EXIT_STOPPED:
        job.state = requeue_policy.NODE_FAIL
    else:
        job.state = requeue_policy.RUNNING

    if lost == NODE:
        job.log(f"SLURM has lost {first}, on which the batch script of job {job.id} ran.")
        # A node that was set DOWN by hand may be back at once, and srun may not have reported its loss yet.
        held = hosts_of(job.facts.get("NodeList", ""))
        is_given_up = bool(held) and first not in held
        end.note_failed_nodes(silent=[first], replaced=[first] if is_given_up else [])
    else:
        job.log(f"The batch script of job {job.id} on {first} was killed.")

    outcome = end.carry_out(
        EXIT_FAILED if code is None else code,
        attempt.has_progressed(),
        lost=lost_agents,
        # A job that SLURM ends accepts no exclusion, and the lost node may still hold it.
        may_requeue=lost == SCRIPT or job.facts.get("JobState") == "RUNNING",
    )
    # Nothing else would end a job that tolerates the loss of nodes before its time limit.
    is_over = outcome.next != "requeue" and outcome.outcome != "superseded"
    if attempt.settings.tolerates_node_loss and is_over:
        job.scancel()


def _find_lost(attempt: Attempt, job: SlurmJob, first: str) -> str:
    """Return `NODE` or `SCRIPT` if this job's batch script is gone, with its node or alone; empty if not."""
    for _ in range(_POLLS):
        job.poll()
        lost = _lost_by_facts(attempt, job, first)
        if lost is not None:
            return lost

        if job.environ.get("SLURM_NODEID") == "0" and job.facts.get("JobState") == "RUNNING":
            job.sleep(_SHORT_DELAY_S)
        else:
            job.sleep(_DELAY_S)
    return ""


def _lost_by_facts(attempt: Attempt, job: SlurmJob, first: str) -> str | None:
    """Decide what is lost by the newest facts: `NODE`, `SCRIPT` or empty; None if SLURM may not know yet."""
    state = job.facts.get("JobState", "")
    # The controller is away.
    if not state:
        return None
    if job.restarts != job.restart_count or state not in ("RUNNING", "COMPLETING", "FAILED"):
        return ""

    if state != "RUNNING":
        # SLURM ends a job whose script was killed. A script that ends by itself records the end before.
        if not job.script_was_killed or attempt.recorded_end() is not None:
            return ""
        return SCRIPT if attempt.exit_code_of(0) is not None else NODE

    # SLURM has not seen yet that the script on this node is gone.
    if job.environ.get("SLURM_NODEID") == "0":
        return None
    # SLURM ends the job by itself, and requeues it.
    if not attempt.settings.tolerates_node_loss and job.facts.get("Requeue") == "1":
        return ""
    # SLURM took the node from the job.
    held = hosts_of(job.facts.get("NodeList", ""))
    if held and first not in held:
        return NODE

    nodes = job.nodes(first)
    # Only the agent on the first node has ended, or this node was cut off.
    if not job.unanswering(nodes):
        return ""
    return NODE if _DOWN.search(nodes[0].get("State", "")) else None
