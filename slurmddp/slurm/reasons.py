"""Explain why SLURM keeps a job waiting, and what a person can do about it; pure."""

from __future__ import annotations

import re

from slurmddp.slurm.states import clean_reason

_PATIENCE = "Nothing to do: SLURM starts the job by itself."
_SMALLER = _PATIENCE + " A job with fewer nodes or less time may start sooner."
_AGAIN = "Run `slurmddp cancel {run}`, then `slurmddp resume {run}"
_OTHER_PARTITION = (
    "It starts when the site opens the partition. To use another partition, run `slurmddp cancel {run}`, "
    "then `slurmddp resume {run} partition=...`."
)
_HELD = "`scontrol release {job}` releases it; if SLURM refuses this, ask the site for the cause."
_NO_ACCOUNT = (
    "its account may not use this partition",
    _AGAIN + "` with another `account=` or `partition=`.",
)
_NO_QOS = (
    "the partition does not accept its quality of service",
    _AGAIN + "` with another `qos=` or `partition=`.",
)
_NO_PLACE = (
    "no part of the site's network has room for it",
    _SMALLER + " `segment` and `switches` under `sbatch:` in the cluster file narrow the choice of nodes.",
)
_USED_UP = (
    "it asks for more compute time than its account or quality of service has left",
    "Ask the site for more compute time. Or run `slurmddp cancel {run}`, then `slurmddp resume {run}` with "
    "fewer nodes, a shorter `time_limit=`, or another `account=` or `qos=`. "
    "`scontrol show assoc_mgr flags=assoc,qos` shows limits and used time.",
)

_REASONS: dict[str, tuple[str, str]] = {
    # Reasons that any waiting job may have.
    "Priority": ("other jobs are before it in the queue", _SMALLER),
    "Resources": ("the nodes that it needs are busy", _SMALLER),
    "BeginTime": ("its begin time has not come", _PATIENCE),
    "Dependency": ("it waits for another job to end", _PATIENCE),
    "DependencyNeverSatisfied": (
        "the job that it waits for did not end as required, so this job never starts",
        "Run `slurmddp cancel {run}`. Then resume the run that it waits for, and after that this run; or "
        "resume this run without waiting: `slurmddp resume {run} after=[]`.",
    ),
    # Reasons about the job's partition: its limits and its state.
    "PartitionTimeLimit": (
        "it asks for more time than the partition allows",
        "Unchanged, it may never start. " + _AGAIN + " time_limit=...`.",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than the partition has or allows",
        "Unchanged, it may never start. " + _AGAIN + "` with a smaller `nodes=`.",
    ),
    "PartitionDown": ("the partition is switched off", _OTHER_PARTITION),
    "PartitionInactive": ("the partition starts no jobs now", _OTHER_PARTITION),
    "PartitionConfig": (
        "it asks for something that the partition does not allow, often more nodes than the partition has",
        "Compare its nodes, time limit and account with the output of `scontrol show partition`.",
    ),
    # Reasons about nodes that the job needs.
    "ReqNodeNotAvail": (
        "nodes that it needs are down, drained or reserved (often for a maintenance)",
        "`sinfo -R` and `scontrol show res` show the cause. A job whose time limit ends before a maintenance "
        "may start earlier.",
    ),
    "Nodes required for job are DOWN": (
        "nodes that it needs are down, drained or reserved",
        "It starts when the nodes are back; `sinfo -R` shows why they are down.",
    ),
    "NodeDown": (
        "a node that it needs is down",
        "It starts when the node is back; `sinfo -R` shows why it is down.",
    ),
    "BadConstraints": (
        "no node has what it asks for",
        "Compare `constraint`, `gpu_type` and `gpus_per_node` of the cluster file with the nodes' features "
        "and GPUs: `sinfo -o '%N %f %G'`.",
    ),
    # Holds: SLURM does not start such a job by itself.
    "JobHeldUser": ("it is held by you", _HELD),
    "JobHeldAdmin": ("the site holds it, or SLURM does after repeated launch failures", _HELD),
    "launch failed requeued held": (
        "a node could not start it; SLURM requeued it and holds it",
        "Read the log of the batch script (`slurmddp logs --all {run}`), then run `scontrol release {job}`.",
    ),
    "job requeued in": ("a person or the site requeued it and holds it", _HELD),
    "JobHoldMaxRequeue": ("SLURM holds it, because it was requeued more often than the site allows", _HELD),
    "launch failure limit exceeded": ("it failed to start too often; SLURM holds it", _HELD),
    "user env retrieval failed": (
        "a node could not load your login environment; SLURM requeued it and holds it",
        "Correct your shell's profile if it fails or is slow, then `scontrol release {job}`.",
    ),
    "License request": (
        "the site no longer has the licences that it asks for, and SLURM holds it",
        _AGAIN + " cluster.sbatch.licenses=...`; `scontrol show licenses` lists the licences.",
    ),
    # SLURM has dozens of reasons for limits of an account or a QOS, such as QOSMaxCpuPerUserLimit. The
    # first letters show what a person can do.
    "QOS": (
        "a limit of its quality of service is reached",
        "It starts when enough of your other jobs have ended. `sacctmgr show qos` lists the limits; "
        "`qos=` chooses another quality of service.",
    ),
    "QOSGrp": (
        "the jobs of its quality of service together have reached a limit",
        "It starts when enough of these jobs have ended. `sacctmgr show qos` lists the limits; `qos=` "
        "chooses another quality of service.",
    ),
    "QOSMin": (
        "it asks for less than its quality of service requires",
        "Unchanged, it never starts. " + _AGAIN + "` with more nodes, GPUs or CPUs, or another `qos=`.",
    ),
    "Assoc": (
        "a limit of your account is reached",
        "It starts when enough jobs of your account have ended. `sshare` shows what the account uses; "
        "`account=` chooses another account.",
    ),
    "Max": (
        "a limit of its account is reached",
        "It starts when enough jobs of the account have ended. `sacctmgr show assoc` lists the limits; "
        "`account=` chooses another account.",
    ),
    "AccountingPolicy": (
        "a limit of its account or quality of service is reached",
        "It starts when enough of your other jobs have ended. `sacctmgr show assoc` and `sacctmgr show qos` "
        "list the limits.",
    ),
    "MaxMemPerLimit": (
        "it asks for more memory than SLURM allows",
        _AGAIN + "` with a smaller `mem_gb=`.",
    ),
    "InvalidAccount": (
        "SLURM does not know its account",
        _AGAIN + " account=...`; `sacctmgr show associations user=$USER` lists your accounts.",
    ),
    "InvalidQOS": (
        "SLURM does not know its quality of service",
        _AGAIN + " qos=...`; `sacctmgr show qos` lists the qualities of service.",
    ),
    "AccountNotAllowed": _NO_ACCOUNT,
    "Job's account not": _NO_ACCOUNT,
    "QOSNotAllowed": _NO_QOS,
    "Job's QOS not": _NO_QOS,
    # Reasons about the job's reservation.
    "ReservationInvalid": (
        "its reservation is not valid",
        "`scontrol show res` lists the reservations. " + _AGAIN + "` with another `cluster.reservation=`, or "
        "with `cluster.reservation=null` to use none.",
    ),
    "ReservationDeleted": (
        "its reservation is gone",
        _AGAIN + "` with another `cluster.reservation=`, or with `cluster.reservation=null` to use none.",
    ),
    # Reasons about the topology of the site's network. SLURM 26.05 writes them as sentences.
    "Required nodes": _NO_PLACE,
    "No suitable topology unit": _NO_PLACE,
    "Insufficient resources in topology unit": _NO_PLACE,
    "Weight-based selection": _NO_PLACE,
    "Exceeded maximum node limit during topology": _NO_PLACE,
    "No available nodes in topology": _NO_PLACE,
    "JobArrayTaskLimit": ("as many elements of its array run as may run at the same time", _PATIENCE),
    # Reasons about other resources, and about the state of SLURM itself.
    "Constraints": ("no node fits its constraint now", _PATIENCE),
    "MaxPoweredUpNodes": ("as many nodes are switched on as the site allows at once", _SMALLER),
    "MpiPortsBusy": ("other jobs use all ports that the site gives to MPI jobs", _PATIENCE),
    "NvidiaImexChannels": ("other jobs use all IMEX channels, over which GPUs share memory", _PATIENCE),
    "Licenses": ("it waits for a licence", _PATIENCE),
    "Reservation": ("its reservation has not begun", _PATIENCE),
    "SchedDefer": ("SLURM's scheduler has not considered it yet, but will in its next cycle", _PATIENCE),
    "BurstBuffer": ("its burst buffer is not ready", _PATIENCE),
    "Power": ("SLURM has no power left for its nodes", _PATIENCE),
    "FedJobLock": ("another cluster of the federation may start it", _PATIENCE),
    "DeadLine": (
        "it can't end before its deadline",
        _AGAIN + "` with a later `cluster.sbatch.deadline=` or a shorter `time_limit=`.",
    ),
    "FrontEndDown": ("the site's front end is down", "It starts when the front end comes back."),
    "SystemFailure": (
        "SLURM failed to start it",
        "Ask the site, and send the output of `scontrol show job {job}`.",
    ),
    "JobLaunchFailure": (
        "a node could not start it",
        "Read the log of the batch script (`slurmddp logs --all {run}`); `sinfo -R` shows nodes with faults.",
    ),
    "Prolog": ("its nodes are being prepared", _PATIENCE),
    "Cleaning": ("SLURM still cleans up the nodes of its last attempt", _PATIENCE),
}
"""By the first letters of SLURM's reason: why the job waits, and advice. The longest match counts."""


def explain(reason: str, *, run: str, job_id: str, start: str = "", again: bool = False) -> tuple[str, str]:
    """Return why a job waits and what to do; an unknown reason is quoted.

    Args:
        reason: SLURM's reason.
        run: the name of the run.
        job_id: the id of the job.
        start: the expected start, as SLURM prints it; empty if not known.
        again: whether the job has run before and was requeued. SLURM then delays its next start.

    Returns:
        A clause with the cause, and sentences with what to do.
    """
    reason = clean_reason(reason)
    if not reason:
        return "SLURM has not considered it yet", _PATIENCE

    # SLURM itself gives a requeued job a begin time, which at most sites is two minutes after the requeue.
    if reason == "BeginTime" and again:
        when = f"at {start}" if start else "after a delay"
        return f"SLURM requeued it and starts it again {when}", _PATIENCE

    # The job exceeds a limit for a single job, so it does not start when other jobs end.
    if re.match(r"(?:QOS|Assoc)\w*Per(?:Job|Node)", reason):
        return (
            "it asks for more than its account or quality of service gives one job",
            f"Unchanged, it never starts; `slurmddp explain {run}` names the limit. Run `slurmddp cancel "
            f"{run}`, then `slurmddp resume {run}` with fewer nodes, or with less of what the limit counts.",
        )

    # The limits GrpTRESMins and GrpWall also count jobs that have ended, so no end of a job helps. The
    # pattern omits GrpTRESRunMins, which counts only running jobs.
    if re.match(r"(?:QOS|Assoc)Grp(?:\w*(?<!Run)Minutes|WallLimit)", reason):
        return _USED_UP

    for name in sorted(_REASONS, key=len, reverse=True):
        if reason.startswith(name):
            why, action = _REASONS[name]
            if start:
                why += f" (SLURM expects to start it at {start})"
            return why, action.replace("{run}", run).replace("{job}", job_id)

    return f"SLURM's reason is {reason!r}", ""
