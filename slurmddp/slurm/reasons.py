"""Explain why SLURM keeps a job waiting, and what a person can do about it; pure."""

from __future__ import annotations

import re

from slurmddp.slurm.states import clean_reason

_PATIENCE = "Nothing to do: it starts when its turn comes."
_SMALLER = _PATIENCE + " Fewer nodes or less time start sooner."
_OTHER_PARTITION = (
    "It starts when the site opens the partition. For another partition: cancel it, then "
    "`slurmddp resume {run} partition=...`."
)
_HELD = "Release it with `scontrol release {job}`, or ask the site why it holds it."
_NO_ACCOUNT = (
    "its account may not use this partition",
    "Cancel it, then `slurmddp resume {run}` with another `account=` or `partition=`.",
)
_NO_QOS = (
    "the partition does not accept its quality of service",
    "Cancel it, then `slurmddp resume {run}` with another `qos=` or `partition=`.",
)
_USED_UP = (
    "it asks for more than is left of the time that its account or quality of service may use in all",
    "Ask the site for more, or cancel it and ask for less, or for another `account=` or `qos=`; "
    "`scontrol show assoc_mgr flags=assoc,qos` shows what is used.",
)

_REASONS: dict[str, tuple[str, str]] = {
    # Reasons that any waiting job may have.
    "Priority": ("other jobs stand before it in the queue", _SMALLER),
    "Resources": ("the nodes it needs are busy", _SMALLER),
    "BeginTime": ("its begin time has not come", _PATIENCE),
    "Dependency": ("it waits for another job to end", _PATIENCE),
    "DependencyNeverSatisfied": (
        "the job that it waits for ended in such a way that this job never starts",
        "Cancel it and resume the run that it waits for, then this run; or start it without a wait: "
        "`slurmddp resume {run} after=[]`.",
    ),
    # Limits and states of the job's partition.
    "PartitionTimeLimit": (
        "it asks for more time than the partition allows",
        "Cancel it, then `slurmddp resume {run} time_limit=...`; unchanged, it may never start.",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than the partition has or allows",
        "Cancel it, then submit it again with a smaller `nodes=`; unchanged, it may never start.",
    ),
    "PartitionDown": ("the partition is switched off", _OTHER_PARTITION),
    "PartitionInactive": ("the partition takes no jobs now", _OTHER_PARTITION),
    "PartitionConfig": (
        "the partition does not allow what it asks for, often more nodes than it has",
        "Compare nodes, time and account with `scontrol show partition`.",
    ),
    # Nodes that the job needs.
    "ReqNodeNotAvail": (
        "nodes that it needs are down, drained or reserved (often for a maintenance)",
        "See `sinfo -R` and `scontrol show res`; a job that ends before a maintenance may start.",
    ),
    "Nodes required for job are DOWN": (
        "nodes that it needs are down, drained or reserved",
        "See `sinfo -R`; it starts when they come back.",
    ),
    "NodeDown": ("a node that it needs is down", "See `sinfo -R`; it starts when the node comes back."),
    "BadConstraints": (
        "no node has what it asks for",
        "Check the cluster file's constraint, GPU type and counts with `sinfo -o '%N %f %G'`.",
    ),
    # Holds: SLURM does not start such a job by itself.
    "JobHeldUser": ("it is held by you", _HELD),
    "JobHeldAdmin": ("it is held by the site, or after repeated launch failures", _HELD),
    "launch failed requeued held": (
        "a node could not start it; SLURM requeued it and holds it",
        "Look at the batch log, then `scontrol release {job}`.",
    ),
    "job requeued in": ("a person or the site requeued it and holds it", _HELD),
    "JobHoldMaxRequeue": ("it was requeued too often", _HELD),
    # Beginnings of the limits of an account or a QOS: dozens of limits differ only in their ends.
    "QOS": (
        "a limit of its quality of service is reached",
        "It starts when your other jobs end; `sacctmgr show qos` lists the limits, `qos=` chooses another.",
    ),
    "QOSGrp": (
        "a limit of all jobs of its quality of service together is reached",
        "It starts when such jobs end; `sacctmgr show qos` lists the limits, `qos=` chooses another.",
    ),
    "QOSMin": (
        "it asks for less than its quality of service requires",
        "Unchanged, it never starts: cancel it, and ask for more or for another `qos=`.",
    ),
    "Assoc": (
        "a limit of your account is reached",
        "It starts when jobs of your account end; `sshare` shows what is used, `account=` chooses another.",
    ),
    "Max": (
        "a limit of its account is reached",
        "It starts when its jobs end; `sacctmgr show assoc` lists the limits, `account=` chooses another.",
    ),
    "AccountingPolicy": (
        "a limit of its account or quality of service is reached",
        "It starts when your other jobs end; `sacctmgr show assoc` and `sacctmgr show qos` list the limits.",
    ),
    "MaxMemPerLimit": (
        "it asks for more memory than allowed",
        "Cancel it and submit it again with a smaller `mem_gb=`.",
    ),
    "InvalidAccount": (
        "SLURM does not know its account",
        "Cancel it and submit it again with a valid `account=`.",
    ),
    "InvalidQOS": (
        "SLURM does not know its quality of service",
        "Cancel it and submit it again with a valid `qos=`.",
    ),
    "AccountNotAllowed": _NO_ACCOUNT,
    "Job's account not": _NO_ACCOUNT,
    "QOSNotAllowed": _NO_QOS,
    "Job's QOS not": _NO_QOS,
    # The job's reservation.
    "ReservationInvalid": (
        "its reservation is not valid",
        "Compare it with `scontrol show res`; cancel it and submit it again with another `reservation`, or "
        "without one.",
    ),
    "ReservationDeleted": (
        "its reservation is gone",
        "Cancel it and submit it again with another `reservation`, or without one.",
    ),
    "JobArrayTaskLimit": ("its array runs as many elements at once as it is allowed to", _PATIENCE),
    # Other resources, and the state of SLURM itself.
    "Licenses": ("it waits for a licence", _PATIENCE),
    "Reservation": ("its reservation has not begun", _PATIENCE),
    "SchedDefer": ("SLURM considers it in the next cycle of its scheduler", _PATIENCE),
    "BurstBuffer": ("its burst buffer is not ready", _PATIENCE),
    "Power": ("SLURM has no power left for its nodes", _PATIENCE),
    "FedJobLock": ("another cluster of the federation may start it", _PATIENCE),
    "DeadLine": (
        "it can't end before its deadline",
        "Cancel it and submit it again with a later `deadline`, or with less time.",
    ),
    "FrontEndDown": ("the site's front end is down", "It starts when the front end comes back."),
    "SystemFailure": ("SLURM failed to start it", "Ask the site: `scontrol show job {job}` has the details."),
    "JobLaunchFailure": (
        "a node could not start it",
        "Look at the batch log; `sinfo -R` shows nodes with faults.",
    ),
    "Prolog": ("its nodes are being prepared", _PATIENCE),
    "Cleaning": ("its last attempt is still being cleaned up", _PATIENCE),
}
"""For the beginning of each reason: why the job waits, and what to do. The longest beginning counts."""


def explain(reason: str, *, run: str, job_id: str, start: str = "", again: bool = False) -> tuple[str, str]:
    """Return why a job waits and what to do; an unknown reason is quoted.

    Args:
        reason: SLURM's reason.
        run: the name of the run.
        job_id: the id of the job.
        start: the expected start, as SLURM prints it; empty if not known.
        again: whether the job has run before and was requeued.

    Returns:
        A clause with the cause, and sentences with what to do.
    """
    reason = clean_reason(reason)
    if not reason:
        return "SLURM has not considered it yet", _PATIENCE

    # SLURM gives a requeued job a begin time, on most sites two minutes later.
    if reason == "BeginTime" and again:
        when = f"at {start}" if start else "after a delay"
        return f"SLURM requeued it and starts it again {when}", _PATIENCE

    # A limit of one job does not change when other jobs end.
    if re.match(r"(?:QOS|Assoc)\w*Per(?:Job|Node)", reason):
        return (
            "it asks for more than its account or quality of service gives one job",
            f"Unchanged, it never starts: `slurmddp explain {run}` names the limit; cancel it, ask for less.",
        )

    # GrpTRESMins and GrpWall also count jobs that have ended; GrpTRESRunMins does not, so it is left out.
    if re.match(r"(?:QOS|Assoc)Grp(?:\w*(?<!Run)Minutes|WallLimit)", reason):
        return _USED_UP

    for name in sorted(_REASONS, key=len, reverse=True):
        if reason.startswith(name):
            why, action = _REASONS[name]
            if start:
                why += f" (SLURM expects to start it at {start})"
            return why, action.replace("{run}", run).replace("{job}", job_id)

    return f"SLURM's reason is {reason!r}", ""
