"""End an attempt whose batch script was killed, alone or with its node; a surviving agent runs this code.

SLURM does not end a job that tolerates the loss of nodes, even if the job lost its first node. Such a job
would hold its nodes until the time limit. If only the script was killed, SLURM ends the job as failed, and
does not requeue it.
"""

from __future__ import annotations

import re

from slurmddp.batch import requeue_policy
from slurmddp.batch.attempt import Attempt
from slurmddp.batch.end import AttemptEnd
from slurmddp.batch.slurm_job import SlurmJob, hosts_of
from slurmddp.errors import EXIT_FAILED, EXIT_STOPPED

_POLLS = 90
"""The largest number of queries about the job. With `_DELAY_S` between them they take 15 minutes."""
_DELAY_S = 10.0
"""Seconds between two queries: SLURM may need minutes to declare a node as failed."""
_SHORT_DELAY_S = 1.0
"""Seconds from one query to the next on the first node itself, where SLURM soon notices a killed script."""
_DOWN = re.compile(r"DOWN|FAIL|ERROR|NOT_RESPONDING|\*")
"""States in which a node can't run an agent. A star marks a node that does not respond (sinfo(1))."""
NODE = "node"
"""Result of `_find_lost`: the job has lost its first node, on which the batch script ran."""
SCRIPT = "script"
"""Result of `_find_lost`: the batch script was killed, but its node is up."""


def first_node_lost(attempt: Attempt, job: SlurmJob) -> None:
    """Record the end of the attempt if its batch script was killed; at most one agent does so."""
    mark = attempt.log_dir / "first-node-lost"
    try:
        mark.mkdir()
    except OSError:
        # Another agent has created the folder and concludes the attempt already.
        return

    first = job.hosts[0] if job.hosts else ""
    lost = _find_lost(attempt, job, first)
    if not lost:
        # The script still runs. If it is killed later, an agent must be able to conclude the attempt then.
        mark.rmdir()
        return

    end = AttemptEnd(attempt, job)
    code = attempt.exit_code_of(0)
    lost_agents = {}
    if code is None:
        lost_agents[0] = first

    # If the node is lost, or node 0's agent recorded 75, SLURM ended the ranks. Otherwise the ranks had ended
    # by themselves before the script was killed.
    if lost == NODE or code == EXIT_STOPPED:
        job.state = requeue_policy.NODE_FAIL
    else:
        job.state = requeue_policy.RUNNING

    if lost == NODE:
        job.log(f"SLURM has lost {first}, on which the batch script of job {job.id} ran.")
        # The state of the node may not show the loss: a node that was set DOWN by hand may be up again. srun
        # may not have reported it yet. So the node counts as failed if SLURM has removed it from the job's
        # nodes.
        held = hosts_of(job.facts.get("NodeList", ""))
        is_given_up = bool(held) and first not in held
        end.note_failed_nodes(silent=[first], replaced=[first] if is_given_up else [])
    else:
        job.log(f"The batch script of job {job.id} on {first} was killed.")

    outcome = end.carry_out(
        EXIT_FAILED if code is None else code,
        attempt.has_progressed(),
        lost=lost_agents,
        # A job that SLURM is ending accepts no exclusion and may still hold the lost node, so a new job is
        # submitted instead.
        may_requeue=lost == SCRIPT or job.facts.get("JobState") == "RUNNING",
    )
    # SLURM does not end a job that tolerates the loss of nodes; it would hold its nodes to the time limit.
    is_over = outcome.next != "requeue" and outcome.outcome != "superseded"
    if attempt.settings.tolerates_node_loss and is_over:
        job.scancel()


def _find_lost(attempt: Attempt, job: SlurmJob, first: str) -> str:
    """Query SLURM until it shows whether the batch script of the job is gone.

    Returns:
        `NODE` if the first node is lost, `SCRIPT` if only the script was killed. Empty if the script is not
        gone, or if that is still unclear after `_POLLS` queries.
    """
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
    """Decide by scontrol's output whether the first node is lost (`NODE`), the script (`SCRIPT`), or neither.

    The result is empty for neither, and None if SLURM may not have noticed the loss yet.
    """
    state = job.facts.get("JobState", "")
    # slurmctld did not answer.
    if not state:
        return None
    if job.restarts != job.restart_count or state not in ("RUNNING", "COMPLETING", "FAILED"):
        return ""

    if state != "RUNNING":
        # SLURM ends a job whose script was killed. A script that ended by itself has recorded the end, so
        # nothing is lost.
        if not job.script_was_killed or attempt.recorded_end() is not None:
            return ""
        return SCRIPT if attempt.exit_code_of(0) is not None else NODE

    # This is the first node, so it is up, and SLURM has not noticed yet that the script is gone.
    if job.environ.get("SLURM_NODEID") == "0":
        return None
    # Without --no-kill SLURM itself ends and requeues a job that loses a node.
    if not attempt.settings.tolerates_node_loss and job.facts.get("Requeue") == "1":
        return ""
    # SLURM has taken the first node from the job.
    held = hosts_of(job.facts.get("NodeList", ""))
    if held and first not in held:
        return NODE

    nodes = job.nodes(first)
    # The slurmd of the first node answers: only the agent there has ended, or this node's link to it was cut
    # for a time.
    if not job.unanswering(nodes):
        return ""
    return NODE if _DOWN.search(nodes[0].get("State", "")) else None
