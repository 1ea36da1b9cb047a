"""Rules of a site that no key changes: the delay of requeues, and folders that only one job sees."""

from __future__ import annotations

import pytest

from slurmddp.slurm.limits.site_rules import private_tmp, requeue_delay


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({}, "120 s at least (SLURM's default)."),
        ({"AuthInfo": "(null)", "SchedulerParameters": "(null)"}, "120 s at least (SLURM's default)."),
        ({"AuthInfo": "socket=/m,cred_expire=30"}, "30 s at least (AuthInfo=cred_expire)."),
        (
            {"AuthInfo": "cred_expire=30", "SchedulerParameters": "bf_window=9,requeue_delay=0"},
            "0 s at least (SchedulerParameters=requeue_delay).",
        ),
        (
            {"SlurmctldParameters": "idle_on_node_suspend,enable_expedited_requeue"},
            "(SLURM's default). With `requeue: expedite` under `sbatch:` it may start at once.",
        ),
    ],
)
def test_the_delay_of_a_requeued_job_is_named_with_its_source(config: dict[str, str], rule: str) -> None:
    assert requeue_delay(config).endswith(rule)


@pytest.mark.parametrize(
    ("config", "source"),
    [
        ({"NamespaceType": "namespace/linux"}, "(NamespaceType=namespace/linux)"),
        ({"JobContainerType": "job_container/tmpfs"}, "(JobContainerType=job_container/tmpfs)"),
        ({"JobContainerType": "job_container/cncu", "NamespaceType": "(null)"}, ""),
        ({}, ""),
    ],
)
def test_folders_that_only_one_job_sees_are_named_with_their_source(
    config: dict[str, str], source: str
) -> None:
    rule = private_tmp(config)
    assert source in rule and bool(rule) == bool(source)
