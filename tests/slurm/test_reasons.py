"""Why a job waits: each reason of SLURM is explained, with what to do."""

from __future__ import annotations

import pytest

from slurmddp.slurm.reasons import explain


@pytest.mark.parametrize(
    ("reason", "said", "advice"),
    [
        ("Priority", "other jobs", "starts the job by itself"),
        ("(Resources)", "busy", "may start sooner"),
        ("PartitionTimeLimit", "more time", "slurmddp resume gpt time_limit="),
        (
            "DependencyNeverSatisfied",
            "did not end as required, so this job never starts",
            "slurmddp resume gpt after=[]",
        ),
        ("PartitionDown", "switched off", "slurmddp resume gpt partition="),
        ("QOSMaxGRESPerUser", "quality of service", "qos="),
        ("AssocGrpCPURunMinutesLimit", "your account", "when enough jobs of your account have ended"),
        ("AssocGrpCPUMinutesLimit", "more compute time than", "Ask the site for more"),
        ("QOSGrpCPUMinutesLimit", "more compute time than", "Ask the site for more"),
        ("QOSGrpWallLimit", "more compute time than", "Ask the site for more"),
        ("QOSGrpCpuLimit", "the jobs of its quality of service together", "these jobs have ended"),
        ("QOSMaxWallDurationPerJobLimit", "gives one job", "it never starts"),
        ("AssocMaxNodePerJobLimit", "gives one job", "slurmddp explain gpt"),
        ("QOSMaxCpuPerNode", "gives one job", "it never starts"),
        ("QOSMinGRES", "less than its quality of service requires", "it never starts"),
        ("MaxBBPerAccount", "limit of its account", "account="),
        ("ReservationInvalid", "is not valid", "scontrol show res"),
        ("QOSNotAllowed", "does not accept its quality", "qos="),
        ("ReservationDeleted", "is gone", "cluster.reservation=null"),
        ("ReqNodeNotAvail, UnavailableNodes:node[3-4]", "drained or reserved", "sinfo -R"),
        ("JobHeldUser", "held by you", "scontrol release 7"),
        ("job requeued in held state", "requeued it and holds it", "scontrol release 7"),
        ("job requeued in special exit state", "requeued it and holds it", "scontrol release 7"),
        (
            "Job's account not permitted to use this partition (low allows foo not root)",
            "its account may not use this partition",
            "account=",
        ),
        (
            "Job's QOS not permitted to use this partition (low allows foo not normal)",
            "does not accept its quality",
            "qos=",
        ),
        ("some (new) reason (of a site)", "'some (new) reason (of a site)'", ""),
        ("launch failed requeued held", "could not start it", "scontrol release 7"),
        ("launch failure limit exceeded requeued held", "failed to start too often", "scontrol release 7"),
        ("user env retrieval failed requeued held", "your login environment", "shell's profile"),
        ("License request 'm:1' is no longer valid, holding job", "no longer has the licences", "licenses="),
        ("MaxPoweredUpNodes", "switched on", "start sooner"),
        ("NvidiaImexChannels", "IMEX channels", "by itself"),
        ("MpiPortsBusy", "ports", "by itself"),
        ("Constraints", "no node fits its constraint now", "by itself"),
        ("No suitable topology unit found for segment", "site's network", "`segment`"),
        ("Required nodes do not fit topology", "site's network", "`segment`"),
        ("BeginTime", "its begin time has not come", "Nothing to do"),
        ("SomethingNew", "SomethingNew", ""),
        ("", "not considered it yet", "Nothing to do"),
    ],
)
def test_reasons_are_explained(reason, said, advice):
    why, action = explain(reason, run="gpt", job_id="7")
    assert said in why
    assert advice in action


OF_WAITING_JOBS = """
AccountNotAllowed AccountingPolicy AssocGrpCpuLimit AssocMaxJobsLimit AssociationJobLimit
AssociationResourceLimit AssociationTimeLimit BadConstraints BeginTime BurstBufferOperation
BurstBufferResources BurstBufferStageIn Cleaning DeadLine Dependency DependencyNeverSatisfied
FedJobLock FrontEndDown InvalidAccount InvalidQOS JobArrayTaskLimit JobHeldAdmin JobHeldUser
JobHoldMaxRequeue JobLaunchFailure Licenses MaxJobsPerAccount MaxMemPerLimit NodeDown
PartitionConfig PartitionDown PartitionInactive PartitionNodeLimit PartitionTimeLimit PowerNotAvail
PowerReserved Priority Prolog QOSGrpGRES QOSJobLimit QOSMinCpuNotSatisfied QOSNotAllowed
QOSResourceLimit QOSTimeLimit QOSUsageThreshold ReqNodeNotAvail Reservation ReservationDeleted
ReservationInvalid Resources SchedDefer SystemFailure
"""
"""Reasons in the libraries of SLURM 22.05 and 24.11; of the limits of accounts and QOS, one of each kind."""


@pytest.mark.parametrize("reason", OF_WAITING_JOBS.split())
def test_each_reason_of_slurm_for_a_waiting_job_has_words(reason):
    why, action = explain(reason, run="gpt", job_id="7")
    assert reason not in why
    assert action


def test_a_job_that_was_requeued_says_when_it_starts_again():
    start = "2026-11-22 23:03:10"
    why, _ = explain("BeginTime", run="gpt", job_id="7", start=start, again=True)
    assert why == f"SLURM requeued it and starts it again at {start}"
    why, _ = explain("BeginTime", run="gpt", job_id="7", start=start)
    assert why == f"its begin time has not come (SLURM expects to start it at {start})"
