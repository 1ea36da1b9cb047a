"""A job that left no record: `status` asks SLURM's accounting where there is one, and never guesses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.errors import EXIT_CONFIG
from slurmddp.sandbox import Sandbox
from support.runs.agent_runs import wait_until
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.run_processes import agent_of
from support.slurm.sandboxes import own_sandbox
from support.slurm.train_project import SMALL, Command, Run, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture
def accounted() -> Iterator[FaultySandbox]:
    """A sandbox with slurmdbd and a database of its own."""
    with own_sandbox("a", nodes=2, accounting=True) as made:
        yield made


def state_of(run: Run) -> str:
    return str(json.loads(run.command("status", "--json", run.folder.name, cwd=Path("/")))["state"])


def forget_jobs(command: Command, folder: Path) -> None:
    """Let squeue say what it says when slurmctld has forgotten a job, some minutes after its end."""
    folder.mkdir()
    (folder / "squeue").write_text(
        '#!/bin/sh\necho "slurm_load_jobs error: Invalid job id specified" >&2\nexit 1\n'
    )
    (folder / "squeue").chmod(0o755)
    command.environment["PATH"] = f"{folder}:{command.environment['PATH']}"


def killed_run(command: Command) -> Run:
    """A run whose agent and batch script were both killed, so that its folder holds no end."""
    run = command.submit("silent", "nodes=1", "ranks_per_node=1", "train.steps=5000")
    run.wait_step(3)
    assert state_of(run) == "running"
    agent = agent_of(run.folder, 0, 0)
    agent.suspend()  # A living agent puts the job of a killed script back.
    command.slurm("scancel", "--signal=KILL", "--batch", run.job_id)
    agent.kill()
    run.wait("end of the job", lambda: command.slurm("squeue", "-h", "-j", run.job_id, "-t", "R,CG") == "")
    assert not run.events("ended")
    return run


def test_with_accounting_a_forgotten_job_is_looked_up(accounted: Sandbox, tmp_path: Path) -> None:
    command = Command(make_project(tmp_path / "project"), accounted.environment())
    run = killed_run(command)
    command("train", "-m", "+cluster=sandbox", "name=held", "seed=1,2", "+cluster.sbatch.hold=true", *SMALL)
    points = [Run(path, command) for path in (command.project / "runs").glob("held-*") if path.is_dir()]
    command.slurm("scancel", points[0].job_id.partition("_")[0])
    forget_jobs(command, tmp_path / "bin")
    for one in points:
        told = f"job {one.job_id} was cancelled in SLURM"
        one.wait(told, lambda one=one, told=told: told in command("status", one.folder.name), 30)
    run.wait("verdict from sacct", lambda: state_of(run) == "failed")
    listed = json.loads(command("list", "--json", cwd=Path("/")))["runs"]
    states = {row["name"]: row["state"] for row in listed}
    assert states == {run.folder.name: "failed", **{one.folder.name: "cancelled" for one in points}}


def test_without_accounting_a_forgotten_job_is_lost_not_finished(sandbox: Sandbox, tmp_path: Path) -> None:
    command = Command(make_project(tmp_path / "project"), sandbox.environment())
    run = killed_run(command)
    assert state_of(run) == "failed", "slurmctld still remembers it"
    forget_jobs(command, tmp_path / "bin")
    assert state_of(run) == "lost"
    assert "slurmddp resume" in command("status", run.folder.name)


LIFTS_LIMITS = {
    "nodes=2": "at most 1 (MaxNodes)",
    "nodes=2 qos=long": "at most 1 (MaxNodes)",
    "nodes=3 qos=wide": "at most 2 (TotalNodes)",
    "time_limit=60": "at most 00:20:00 (MaxTime)",
    "time_limit=60 qos=wide": "at most 00:20:00 (MaxTime)",
    "nodes=2 qos=wide": "",
    "time_limit=60 qos=long": "",
}
"""Sizes of a job in a partition of one node and 20 minutes; the limit that keeps SLURM from starting it."""


def test_limits_that_a_qos_lifts_are_no_obstacle(accounted: Sandbox, tmp_path: Path) -> None:
    command = Command(make_project(tmp_path / "project"), accounted.environment())
    command.slurm("scontrol", "create", "PartitionName=tiny", "Nodes=ALL", "MaxNodes=1", "MaxTime=20")
    command.slurm("sacctmgr", "-i", "add", "qos", "wide", "flags=PartitionMaxNodes")
    command.slurm("sacctmgr", "-i", "add", "qos", "long", "flags=PartitionTimeLimit")
    command.slurm(
        "sacctmgr", "-i", "modify", "user", "root", "set", "qos=normal,wide,long", "defaultqos=normal"
    )

    run = ["run", "+cluster=sandbox", "partition=tiny", "ranks_per_node=1", "time_limit=10"]
    for given, limit in LIFTS_LIMITS.items():
        words = [*run, *given.split(), f"name={given.replace(' ', '-').replace('=', '')}"]
        code = EXIT_CONFIG if limit else 0
        checked = command(*words, "--check", "--", "true", code=code)
        submitted = command(*words, "--", "true", code=code)
        assert limit in checked and limit in submitted, given
        assert "may never start" not in checked + submitted, given

    def states() -> list[str]:
        return command.slurm("sacct", "-X", "-n", "-o", "state").split()

    wait_until(lambda: command.slurm("squeue", "-h") == "", "end of the jobs", 240)
    # The accounting gets the ends of jobs late.
    taken = list(LIFTS_LIMITS.values()).count("")
    wait_until(lambda: states() == ["COMPLETED"] * taken, "good end of all jobs", 240)


def test_a_job_larger_than_what_all_jobs_of_its_account_or_qos_may_use_would_not_start(
    accounted: FaultySandbox, tmp_path: Path
) -> None:
    command = Command(make_project(tmp_path / "project"), accounted.environment())
    with (accounted.root / "slurm.conf").open("a") as conf:
        conf.write("AccountingStorageEnforce=associations,limits,qos\n")
    accounted.restart_controller()
    for words in (
        "add qos few GrpTRES=cpu=1",
        "add account upper GrpTRES=node=1",
        "add account lower parent=upper",
        "add user root account=lower",
        "modify user root set qos=normal,few defaultqos=normal",
    ):
        command.slurm("sacctmgr", "-i", *words.split())

    run = ["run", "+cluster=sandbox", "ranks_per_node=1", "time_limit=10"]
    limited = {"qos=few cpus_per_node=2": "GrpTRES cpu", "account=lower nodes=2": "GrpTRES node"}
    for given, limit in limited.items():
        assert limit in command(*run, *given.split(), "--check", "--", "true", code=EXIT_CONFIG), given
    waits = command.slurm("sbatch", "--parsable", "-A", "lower", "-N", "2", "--wrap", "true").strip()
    reason = ("squeue", "-h", "-j", waits, "-o", "%r")
    wait_until(lambda: "AssocGrpNodeLimit" in command.slurm(*reason), "SLURM's own judgement", 240)
    assert "would start" in command(*run, "account=lower", "--check", "--", "true")
