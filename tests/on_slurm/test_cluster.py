"""Drafts of cluster files and checks of jobs, on the real SLURM of the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.errors import EXIT_CONFIG
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.train_project import Command

pytestmark = pytest.mark.slurm


def test_drafts_fit_the_site_and_checks_name_what_does_not(sandbox: FaultySandbox, tmp_path: Path) -> None:
    command = Command(tmp_path, sandbox.environment())
    assert "wrote   conf/cluster/high.yaml" in command("cluster", "detect", "--write")
    drafted = (tmp_path / "conf/cluster/low.yaml").read_text()
    for fact in (
        "gpus_per_node: 2 ",
        "max_nodes: 3 ",
        "cpus_per_node: 4 ",
        "PreemptMode=REQUEUE, GraceTime=",
    ):
        assert fact in drafted
    fits = "high: fits this site\nlow: fits this site\n"
    assert command("cluster", "check") == f"{fits}A requeued job waits 5 s at least (AuthInfo=cred_expire).\n"
    said = command("train", "+cluster=low", "nodes=3", "--check")
    assert "would start gpt-" in said and "with 12 processors on nodes " in said
    said = command("train", "+cluster=sandbox", "nodes=4", "time_limit=9-0", "--check", code=EXIT_CONFIG)
    assert "nodes=4: partition 'low' gives a job at most 3 (TotalNodes)" in said
    assert "time_limit=9-00:00:00: partition 'low' allows at most 1-00:00:00 (MaxTime)" in said
    said = command("train", "+cluster=low", "+cluster.sbatch.mailtype=END", "--check", code=EXIT_CONFIG)
    assert "unrecognized option '--mailtype=END'" in said and "Did you mean mail-type" in said
    assert sandbox.jobs() == {} and not (tmp_path / "runs").exists()


def test_a_waiting_job_is_explained(sandbox: FaultySandbox, tmp_path: Path) -> None:
    command = Command(tmp_path, sandbox.environment())
    command("train", "+cluster=sandbox", "+cluster.sbatch.begin=now+1hour", "name=later")
    said = command("explain", "later")
    assert "reason     BeginTime\n" in said and "start      expected at 20" in said
    assert "queue  " not in said and "limit" not in said  # SLURM does not look at it yet.
    assert "its begin time has not come (SLURM expects to start it at 20" in command("status", "later")
