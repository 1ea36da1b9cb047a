"""The whole way on a real SLURM: submit, train on several nodes, be interrupted, end with the same bits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import TESTS
from support.slurm.run_processes import processes_of, ranks_of
from support.slurm.train_project import SMALL, UNHURRIED, Command, Run, make_project, occupy

pytestmark = [pytest.mark.slurm, pytest.mark.shared_folder, pytest.mark.timeout(600)]

STEPS = "train.steps=80"
SUBMITTERS = ("sbatch", "submitit")


@pytest.fixture(scope="module")
def command(sandbox, tmp_path_factory) -> Command:
    return Command(make_project(tmp_path_factory.mktemp("project")), sandbox.environment())


@pytest.fixture(scope="module")
def undisturbed(command: Command) -> Run:
    """A run of the same training that nobody interrupts; the others must end with its bits."""
    run = command.submit("undisturbed", "nodes=2", STEPS)
    run.wait_finished()
    return run


def assert_same_training(run: Run, reference: Run) -> None:
    assert run.losses() == reference.losses()
    mine, theirs = run.checkpoint(), reference.checkpoint()
    assert mine["state.safetensors"] == theirs["state.safetensors"]


def test_two_nodes_with_two_ranks_train_to_the_end(undisturbed: Run, command: Command) -> None:
    assert undisturbed.steps() == 80
    (started,) = undisturbed.events("started")
    assert started["job_id"] == undisturbed.job_id
    logs = sorted(path.name for path in (undisturbed.folder / "logs/attempt-0").glob("rank-*.log"))
    assert logs == ["rank-0.log", "rank-1.log", "rank-2.log", "rank-3.log"]
    assert undisturbed.losses()[80] < undisturbed.losses()[1]
    assert "finished" in command("status", undisturbed.folder.name, cwd=Path("/"))
    assert (undisturbed.folder / "report.html").is_file()
    assert undisturbed.folder.name in command("list", cwd=Path("/"))
    assert "finished" in command("train", "+cluster=sandbox", "name=undisturbed", *undisturbed_overrides())
    assert len(undisturbed.events("submitted")) == 1


def undisturbed_overrides() -> list[str]:
    return [*SMALL, "nodes=2", STEPS]


def test_preempted_jobs_come_back_and_end_with_the_same_bits(command: Command, undisturbed: Run) -> None:
    """One job of each submitter; a single one of higher priority preempts both."""
    own = ["nodes=2", STEPS, UNHURRIED]
    runs = [command.submit(f"preempted-{name}", *own, f"submitter={name}") for name in SUBMITTERS]
    for run in runs:
        run.wait_step(5)
    occupy(command)
    for run in runs:
        run.wait_finished()
        first, *_, last = run.events("ended")
        assert (first["outcome"], last["outcome"]) == ("stopped", "finished")
        assert len({event["job_id"] for event in run.events("started")}) == 1, "requeued, not submitted again"
        assert run.events("resumed")[-1]["step"] >= 5
        assert_same_training(run, undisturbed)


def test_ranks_in_a_container_without_slurm_are_stopped_and_come_back(
    command: Command, undisturbed: Run, tmp_path: Path
) -> None:
    """Only the batch script outside can ask SLURM to requeue the job."""
    hidden = [
        f"--ro-bind /dev/null {shutil.which(name)}" for name in ("scontrol", "sbatch", "squeue", "srun")
    ]
    box = f"bwrap --bind / / --dev /dev --unshare-ipc {' '.join(hidden)} --setenv IN_BOX yes"
    python = tmp_path / "python-in-box"
    python.write_text(f'#!/bin/sh\nexec {box} {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = command.submit("contained", "nodes=2", STEPS, UNHURRIED, f"cluster.python={python}")
    run.wait_step(5)
    step = processes_of(run.folder)
    assert {process.environ().get("IN_BOX") for process in step.values()} == {"yes"}
    command.slurm("scancel", "--signal=USR2", "--full", run.job_id)
    run.wait_finished()
    assert [event["outcome"] for event in run.events("ended")] == ["stopped", "finished"]
    assert {event["job_id"] for event in run.events("started")} == {run.job_id}
    assert_same_training(run, undisturbed)


def test_a_job_at_its_time_limit_comes_back_and_ends_with_the_same_bits(
    command: Command, undisturbed: Run
) -> None:
    # SLURM sends the signal up to half a minute early: here when the job is 30 to 60 s old.
    slow = "+data.delay_s=0.3"
    run = command.submit("limited", "nodes=2", STEPS, slow, "time_limit=2", "policy.signal_lead_s=60")
    run.wait_finished()
    assert run.events("signalled")[0]["signal"] in ("SIGUSR2", "USR2")
    assert run.events("ended")[0]["exit_code"] == 75
    assert len(run.events("started")) >= 2
    assert_same_training(run, undisturbed)


def test_a_killed_rank_fails_the_job_and_is_named(command: Command) -> None:
    never = ["policy.max_restarts=0", "policy.max_restarts_in_place=0"]
    run = command.submit("killed", "nodes=2", STEPS, UNHURRIED, *never)
    run.wait_step(5)
    ranks_of(run.folder)[0].kill()
    run.wait("end", lambda: run.events("ended"))
    assert run.events("ended")[-1]["outcome"] == "failed"
    failure = json.loads((run.folder / "logs/attempt-0/failure.json").read_text())
    assert failure["signal"] == "SIGKILL"
    logs = run.folder / "logs/attempt-0"
    assert {(logs / f"exit-node-{node}").read_text() for node in (0, 1)} == {"1\n"}
    assert json.loads((logs / f"exit-rank-{failure['rank']}").read_text())["signal"] == "SIGKILL"
    assert len(list(logs.glob("exit-rank-*"))) == 4
    told = command("status", run.folder.name, code=None)
    assert f"rank {failure['rank']}" in told
    assert failure["host"] in told
    run.wait("empty queue", lambda: command.slurm("squeue", "-h", "-j", run.job_id, "-t", "R,CG,PD") == "")


def test_a_killed_rank_is_retried_after_progress(command: Command, undisturbed: Run) -> None:
    retry = ["policy.max_restarts=1", "policy.max_restarts_in_place=0", "train.save_every=5"]
    run = command.submit("retried", "nodes=2", STEPS, UNHURRIED, *retry)
    run.wait("checkpoint", lambda: run.events("saved"))
    run.wait_step(7)
    ranks_of(run.folder)[-1].kill()
    run.wait_finished()
    assert [event["outcome"] for event in run.events("ended")] == ["failed", "finished"]
    assert run.losses() == undisturbed.losses()
    told = json.loads(command("status", "--json", run.folder.name))
    parts = told["goodput"]["parts"]
    assert set(parts) == {"queued", "starting", "training", "saving", "lost", "ending"}
    begun = json.loads((run.folder / "attempts.jsonl").read_text().splitlines()[0])["time"]
    assert sum(parts.values()) == pytest.approx(run.events("ended")[-1]["time"] - begun, abs=0.1)
    assert list(told["phases"]["seconds"])[:4] == ["launch", "imports", "fork", "rendezvous"]


def test_what_only_memory_holds_when_an_attempt_fails_is_not_lost(command: Command, undisturbed: Run) -> None:
    retry = ["policy.max_restarts=1", "policy.max_restarts_in_place=0", "train.memory_save_every=5"]
    run = command.submit("held", "nodes=2", STEPS, UNHURRIED, *retry)
    run.wait_step(23)
    ranks_of(run.folder)[-1].kill()
    run.wait_finished()
    assert [event["outcome"] for event in run.events("ended")] == ["failed", "finished"]
    assert run.events("saved")[0]["step"] >= 20
    assert run.events("resumed")[0]["step"] == run.events("saved")[0]["step"]
    assert_same_training(run, undisturbed)


def test_nothing_runs_after_cancel_until_it_is_resumed(command: Command) -> None:
    own = ["nodes=2", STEPS, UNHURRIED]
    runs = [command.submit(f"cancelled-{name}", *own, f"submitter={name}") for name in SUBMITTERS]
    for run in runs:
        run.wait_step(3)
        assert len(ranks_of(run.folder)) == 4
    for run in runs:
        command("cancel", run.folder.name, cwd=Path("/"))
    for run in runs:
        job = ["-j", run.job_id, "-t", "R,CG,PD,CF"]
        run.wait("empty queue", lambda job=job: command.slurm("squeue", "-h", *job) == "")
        run.wait("end of its processes", lambda run=run: not processes_of(run.folder))
        assert "cancelled" in command("status", run.folder.name, code=None)
        assert len(run.events("submitted")) == 1
    for run in runs:
        command("resume", run.folder.name, cwd=Path("/"))
    for run in runs:
        run.wait_finished()
        assert len(run.events("submitted")) == 2


def test_a_bug_in_the_training_is_not_repeated(command: Command) -> None:
    run = command.submit("buggy", "nodes=2", STEPS, "+data.delay_s=-1")
    run.wait("end", lambda: run.events("ended"))
    run.wait("empty queue", lambda: command.slurm("squeue", "-h", "-j", run.job_id, "-t", "R,CG,PD") == "")
    assert len(run.events("started")) == 1
    told = command("status", run.folder.name, code=None)
    assert "Error" in told
    assert "rank" in told


def test_logs_follow_a_run_to_its_end(command: Command) -> None:
    run = command.submit("followed", "nodes=1", "train.steps=20")
    text = command("logs", "-f", run.folder.name, cwd=Path("/"))
    assert run.events("ended")[-1]["outcome"] == "finished"
    assert "[rank 0]" in text


def test_a_script_under_srun_ends_with_the_weights_of_launched_ranks(
    command: Command, tmp_path: Path
) -> None:
    script = str(TESTS / "support" / "distributed" / "spirals.py")
    alone = [sys.executable, script, "--epochs", "2", "--weights"]
    environment = {**command.environment, "OMP_NUM_THREADS": "1"}
    launched, stepped = tmp_path / "launched.pt", tmp_path / "srun.pt"
    subprocess.run([*alone, launched, "--devices", "2"], env=environment, check=True, timeout=240)
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    subprocess.run([*srun, *alone, stepped], env=environment, check=True, timeout=240)
    ours, theirs = (torch.load(file, weights_only=True) for file in (stepped, launched))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
