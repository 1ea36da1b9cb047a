"""Elements of a sweep's array behave as single jobs do: preemption, stops, lost answers, foreign jobs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.runs.folder.excluded_nodes import exclude
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.sandbox import Sandbox
from support.slurm.sandboxes import nodes_of
from support.slurm.train_project import SMALL, Command, Run, make_project, occupy

pytestmark = [pytest.mark.slurm, pytest.mark.shared_folder, pytest.mark.timeout(600)]

UNANSWERED = """#!/bin/sh
case "$*" in *--test-only*) exec {sbatch} "$@" ;; esac
{sbatch} "$@" && echo >>"$0.calls"
{then}
"""
"""An sbatch that submits and gives no answer."""
TIMES_OUT = (
    'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1'
)
KILLS = "kill -KILL $PPID"


@pytest.fixture
def command(sandbox: Sandbox, tmp_path: Path) -> Command:
    return Command(make_project(tmp_path / "project"), sandbox.environment())


@pytest.fixture
def cut(sandbox: Sandbox) -> Iterator[str]:
    """A partition whose preempted jobs SLURM ends for good."""
    options = ["Nodes=ALL", "PriorityTier=1", "PreemptMode=CANCEL", "GraceTime=10"]
    sandbox.command("scontrol", "create", "PartitionName=cut", *options)
    yield "cut"
    assert sandbox.cancel_jobs()
    sandbox.command("scontrol", "delete", "PartitionName=cut")


def sweep_words(name: str, *more: str) -> list[str]:
    settings = [f"name={name}", "nodes=1", "ranks_per_node=1", "train.steps=60", "+data.delay_s=0.5"]
    return ["train", "-m", "+cluster=sandbox", *SMALL, *settings, *more]


def elements(command: Command, name: str) -> list[Run]:
    """Return the runs of a sweep, in the order of their elements."""
    folders = [folder for folder in (command.project / "runs").glob(f"{name}-*") if folder.is_dir()]
    return sorted((Run(folder, command) for folder in folders), key=lambda run: run.job_id)


def unanswered(command: Command, folder: Path, then: str) -> Path:
    """Put an sbatch before SLURM's on the PATH; return the file with a line for each of its submissions."""
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(UNANSWERED.format(sbatch=shutil.which("sbatch"), then=then))
    program.chmod(0o755)
    command.environment["PATH"] = f"{folder}:{command.environment['PATH']}"
    return folder / "sbatch.calls"


def queue(command: Command, job: str, form: str) -> str:
    return command.slurm("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", form)


def test_elements_that_are_preempted_or_stopped(command: Command, cut: str) -> None:
    shown = command(
        *sweep_words("cut", "seed=range(1,5)", "array_parallelism=2", f"+cluster.partition={cut}")
    )
    sweep = shown.rpartition("slurmddp list ")[2].split()[0]
    command(*sweep_words("low", "seed=1,2"))
    runs, others = elements(command, "cut"), elements(command, "low")
    requeued, refused, third, last = runs
    for run in (requeued, refused, *others):
        run.wait_step(2)

    waits = json.loads(command("explain", "--json", last.folder.name))
    assert (waits["state"], waits["job_id"]) == ("queued", last.job_id)
    assert waits["wait"]["reason"] == "JobArrayTaskLimit" and waits["wait"]["ahead"] == 1
    assert "as many elements of its array run as may run at" in command("status", last.folder.name)
    assert "has no logs yet. Its state: queued" in command("logs", last.folder.name)
    assert f"job {last.job_id} was taken out of the queue" in command("stop", last.folder.name)

    command.slurm("scontrol", "update", f"JobId={refused.job_id}", "Requeue=0")
    (failed,) = nodes_of(requeued, 0)
    exclude(RunFolder(requeued.folder), failed, "by a test", hours=1)
    occupy(command)
    for run in (requeued, refused, *others):
        run.wait("end", lambda run=run: run.events("ended"))
        how = "resubmit" if run is refused else "requeue"
        assert [(end["outcome"], end["next"]) for end in run.events("ended")] == [("stopped", how)]
    told = [command.slurm("scontrol", "-o", "show", "job", run.job_id) for run in (requeued, third)]
    assert [f"ExcNodeList={failed} " in one for one in told] == [True, False]
    third.wait("start", lambda: third.events("started"))
    assert f"is cancelled (job {third.job_id})" in command("cancel", third.folder.name)
    for run in (requeued, refused, *others):
        run.wait_finished()
        assert sorted(run.losses()) == list(range(1, 61))
    assert nodes_of(requeued, 1) != [failed]
    assert [event["job_id"] for event in requeued.events("started")] == [requeued.job_id] * 2
    (first, again) = refused.events("submitted")
    assert [event["job_id"] for event in refused.events("started")] == [first["job_id"], again["job_id"]]
    assert "_" not in again["job_id"] and again["resubmitted"]
    listed = command("list", sweep)
    assert [listed.count(f" {state} ") for state in ("finished", "stopped", "cancelled")] == [2, 1, 1]


def test_one_array_trains_whoever_submits_it_and_however_its_answer_is_lost(
    command: Command, tmp_path: Path
) -> None:
    held = "+cluster.sbatch.hold=true"
    calls = unanswered(command, tmp_path / "killed", KILLS)
    command(*sweep_words("killed", "seed=1,2", held), code=-9)
    assert "SLURM already has job" in command(*sweep_words("killed", "seed=1,2", held))
    assert calls.read_text() == "\n"
    ids = [run.job_id for run in elements(command, "killed")]
    array = ids[0].partition("_")[0]
    assert ids == [f"{array}_0", f"{array}_1"]

    calls = unanswered(command, tmp_path / "silent", TIMES_OUT)
    words = [sys.executable, "-m", "slurmddp", *sweep_words("silent", "seed=1,2,3", held)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [subprocess.Popen(words, cwd=command.project, env=command.environment, **pipes) for _ in range(2)]
    told = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert calls.read_text() == "\n", told
    runs = elements(command, "silent")
    assert len({run.job_id.partition("_")[0] for run in runs}) == 1
    for name in ("killed", "silent"):
        sweep = next((command.project / "runs").glob(f"{name}-*.sweep")).stem
        assert command("cancel", sweep).count("is cancelled (job") == len(elements(command, name))
    assert command.slurm("squeue", "-h", "-t", "PENDING,RUNNING") == ""


def test_the_elements_of_a_foreign_array_with_the_same_ids_are_left_alone(command: Command) -> None:
    """As after a controller has lost its state, or has counted past its largest number."""
    command(*sweep_words("ours", "seed=1,2", "+cluster.sbatch.hold=true"))
    command("cancel", elements(command, "ours")[0].folder.name)
    run = elements(command, "ours")[1]
    command.slurm("scancel", run.job_id)
    hold = ["sbatch", "--parsable", "--hold", "--array=0-3", "--output=/dev/null", "--wrap=sleep 1"]
    theirs = [command.slurm(*hold), command.slurm(*hold, "--comment=slurmddp:array-0123456789ab")]
    for array in theirs:
        RunFolder(run.folder).add_event("submitted", job_id=f"{array}_1", submitter="sbatch")
        told = command("status", run.folder.name)
        assert f"cancelled: SLURM no longer knows job {array}_1" in told
        assert "has nothing to stop" in command("stop", run.folder.name)
        assert "has nothing to cancel" in command("cancel", run.folder.name)
    command("resume", run.folder.name)
    command("cancel", run.folder.name)
    assert [queue(command, array, "%T").split() for array in theirs] == [["PENDING"] * 4] * 2
