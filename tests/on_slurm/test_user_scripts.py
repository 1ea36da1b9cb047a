"""Programs of a user on a real SLURM: ranks that misbehave, that start a step, and a plain command."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox
from support.slurm.train_project import Command, Run, make_project

pytestmark = pytest.mark.slurm

HANGS_AT_ITS_EXIT = """
import atexit, os, threading
import torch.distributed as dist

def hang():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
if os.environ["RANK"] == "1":
    atexit.register(hang)
"""
DEAF = """
import signal, time
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
time.sleep(1000)
"""
STARTS_A_STEP = """
import os, subprocess
if os.environ["RANK"] == "0":
    subprocess.run(["srun", "--overlap", "--nodes=1", "--ntasks=1", "true"], check=True)
"""
COMMAND = """#!/bin/sh
[ "$1" = --resume ] && exit 0
: > saved-$RANK
exec sleep 600
"""


def ended(sandbox: Sandbox, tmp_path: Path, script: str, *overrides: str) -> Run:
    """Run a script and return the run after its first end."""
    project = make_project(tmp_path / "project")
    (project / "mine.py").write_text(script)
    run = Command(project, sandbox.environment()).submit("mine", "program.script=mine.py", *overrides)
    run.wait("end", lambda: run.events("ended"))
    return run


def test_a_rank_that_hangs_at_its_exit_does_not_hold_the_job(sandbox: Sandbox, tmp_path: Path) -> None:
    own = ["nodes=2", "ranks_per_node=1", "policy.stall_timeout_s=3"]
    run = ended(sandbox, tmp_path, HANGS_AT_ITS_EXIT, *own)
    (end,) = run.events("ended")
    assert (end["exit_code"], end["outcome"], end["next"]) == (0, "finished", "none")
    assert "rank 1 on " in (told := run.command("status", run.folder.name))
    assert "hung at its exit" in told


def test_ranks_that_ignore_every_signal_leave_the_batch_script_the_time_to_requeue(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    own = ["nodes=2", "ranks_per_node=1", "time_limit=1", "policy.signal_lead_s=10"]
    run = ended(sandbox, tmp_path, DEAF, *own)
    assert (run.events("ended")[0]["exit_code"], run.events("ended")[0]["next"]) == (75, "requeue")
    run.wait("job that is put back", lambda: run.command.slurm("squeue", "-h"))
    run.command("cancel", run.folder.name, code=None)


def test_srun_works_inside_a_rank(sandbox: Sandbox, tmp_path: Path) -> None:
    """SLURM 24.11 refuses CPU variables that differ."""
    run = ended(sandbox, tmp_path, STARTS_A_STEP, "nodes=1", "ranks_per_node=2", "cpus_per_node=4")
    assert run.events("ended")[0]["outcome"] == "finished", run.story()


def test_a_command_is_requeued_after_a_signal_and_resumes_with_its_argument(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project")
    (project / "work.sh").write_text(COMMAND)
    (project / "work.sh").chmod(0o755)
    command = Command(project, sandbox.environment())
    own = ["program.checkpoints=saved-*", "program.resume_args=--resume"]
    command("run", "+cluster=sandbox", "nodes=2", "-n", "1", *own, "./work.sh")
    run = Run(next((project / "runs").iterdir()), command)
    run.wait("saved files", lambda: len([*project.glob("saved-*")]) == 2)
    command.slurm("scancel", "--signal=USR2", run.job_id)
    run.wait_finished()
    assert [(one["exit_code"], one["next"]) for one in run.events("ended")] == [(75, "requeue"), (0, "none")]
    assert run.events("ended")[0]["progressed"]
