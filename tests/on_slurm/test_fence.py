"""Ends that nobody can tell of, on a real SLURM: a node cut off, an agent killed, a rank deaf to all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.batch.srun_watch import _descendants, _kill
from slurmddp.runs.failures.read import read_failure
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import runs, wait_until
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.run_processes import agent_of, processes_of
from support.slurm.sandboxes import lose, own_sandbox
from support.slurm.train_project import Command, make_project, of_attempt

pytestmark = [pytest.mark.slurm, pytest.mark.shared_folder, pytest.mark.timeout(600)]

DEAF_DATA = '''
import ctypes
import os
from pathlib import Path

from slow_data import SlowDigits


class DeafDigits(SlowDigits):
    """In the attempt whose number stands in `trap`, rank 1 goes into C code for good, with Python's lock."""

    def __init__(self, trap, **options):
        super().__init__(**options)
        self.trap = Path(trap)

    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and self.trap.exists():
            if self.trap.read_text() == os.environ["SLURMDDP_ATTEMPT"]:
                self.trap.with_suffix(".sprung").touch()
                lock = ctypes.create_string_buffer(64)
                for _ in range(2):
                    ctypes.PyDLL(None).pthread_mutex_lock(lock)
        return super().__getitem__(index)
'''
SAVING = ["train.save_every=10", "train.workers=0"]


@pytest.fixture(scope="module")
def losing() -> Iterator[FaultySandbox]:
    """A SLURM that gives a silent node up after seconds, and is slow to kill."""
    with own_sandbox("f", nodes=2, slurmd_timeout_s=5, kill_wait_s=20, grace_s=1) as made:
        yield made


@pytest.fixture(scope="module")
def command(losing: FaultySandbox, tmp_path_factory: pytest.TempPathFactory) -> Command:
    project = make_project(tmp_path_factory.mktemp("project"))
    (project / "deaf_data.py").write_text(DEAF_DATA)
    (project / "conf/data/deaf.yaml").write_text("_target_: deaf_data.DeafDigits\ncontext: 16\n")
    return Command(project, losing.environment())


def test_ranks_on_a_node_that_slurm_has_lost_write_nothing_once_a_later_attempt_has_begun(
    losing: FaultySandbox, command: Command
) -> None:
    run = command.submit("fenced", "nodes=1", "train.steps=100000", *SAVING)
    run.wait("checkpoint", lambda: run.events("saved"))
    (node,) = command.slurm("squeue", "-h", "-j", run.job_id, "-o", "%N").split()
    lose(losing, node)
    orphans = processes_of(run.folder, 0)
    assert len(orphans) == 4  # the agent, its reaper, two ranks
    run.wait("later attempt", lambda: of_attempt(run.events("started"), 1))
    run.wait("end of the orphans", lambda: not processes_of(run.folder, 0))
    run.wait("step of its own", lambda: of_attempt(run.records("metrics.jsonl"), 1))
    run.wait("checkpoint of its own", lambda: of_attempt(run.events("saved"), 1))
    logs = run.folder / "logs" / "attempt-0"
    assert json.loads((logs / "failure.json").read_text())["exit_code"] == 79
    assert (logs / "exit-node-0").read_text() == "79\n"
    assert "Attempt 0 of" in (told := (logs / "rank-0.log").read_text())
    assert "a later attempt has started" in told
    for name in ("metrics.jsonl", "attempts.jsonl"):
        attempts = [record["attempt"] for record in run.records(name) if "attempt" in record]
        assert attempts == sorted(attempts), f"the old attempt wrote into {name} after the new one"
    losing.restore_node(node)
    run.wait("end of its script", lambda: node in command.slurm("sinfo", "-h", "-t", "idle", "-o", "%n"))
    assert run.events("ended") == [], "neither the old script nor SLURM disturbed the new attempt"
    command("stop", run.folder.name)
    run.wait("end", lambda: run.events("ended"))
    ends = [(end["attempt"], end["outcome"], end["next"]) for end in run.events("ended")]
    assert ends == [(1, "stopped", "none")]
    assert [event["attempt"] for event in run.events("started")] == [0, 1]
    assert not any(event["signal"].startswith("SIG") for event in run.events("signalled"))
    losses: dict[int, set[float]] = {}
    for record in run.records("metrics.jsonl"):
        losses.setdefault(record["step"], set()).add(record["loss"])
    assert all(len(values) == 1 for values in losses.values())


def test_the_end_of_an_srun_leaves_its_step_alone(command: Command, tmp_path: Path) -> None:
    """Of a superseded attempt: the step of the later attempt has the same id."""
    started, asked, pid_file = tmp_path / "started", tmp_path / "asked", tmp_path / "pid"
    task = f"trap 'touch {asked}' USR1; touch {started}; while :; do sleep 0.1; done"
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/bash\n(srun bash -c "{task}"; :) & echo $! >{pid_file}; wait; sleep 600\n')
    job_id = command.slurm("sbatch", "--parsable", "-N1", "-o", "/dev/null", str(script))
    wait_until(started.exists, "the task runs")
    shell = int(pid_file.read_text())
    processes = [shell, *_descendants(shell)]
    assert len(processes) == 3, "the subshell, srun, and the child of srun that waits for its death"
    _kill(shell)
    wait_until(lambda: not any(map(runs, processes)), "srun and its child have ended")
    command.slurm("scancel", "--signal=USR1", f"{job_id}.0")
    wait_until(asked.exists, "the step runs on and gets a signal")
    command.slurm("scancel", job_id)


def test_an_agent_that_slurm_can_not_start_ends_the_attempt_and_not_the_run(command: Command) -> None:
    """SLURM can't open its log, as where a file server shows the attempt's folder late."""
    log = "$SLURMDDP_RUN_DIR/logs/attempt-0/node-1.log"
    setup = f"[ $SLURMDDP_ATTEMPT != 0 ] || mkdir {log}"
    run = command.submit("unlaunched", "nodes=2", "train.steps=100000", *SAVING, f"cluster.setup=['{setup}']")
    run.wait("end", lambda: run.events("ended"))
    (end,) = run.events("ended")
    assert (end["outcome"], end["exit_code"], end["next"]) == ("failed", 76, "requeue")
    assert "lost" not in end
    run.wait("steps of the next attempt", lambda: of_attempt(run.records("metrics.jsonl"), 1))
    shown = command("status", "-v", run.folder.name)
    assert "was not started by SLURM: Slurmd could not connect IO" in shown
    assert all("run" in note for note in run.records("excluded.jsonl")), "the notes are other runs'"
    command("cancel", run.folder.name)


def test_a_killed_agent_takes_its_ranks_along_is_named_and_the_job_is_tried_again(command: Command) -> None:
    run = command.submit("headless", "nodes=2", "train.steps=100000", *SAVING)
    run.wait("checkpoint", lambda: run.events("saved"))
    victim = agent_of(run.folder, 0, node_rank=1)
    host = victim.environ()["SLURMD_NODENAME"]
    victim.kill()
    run.wait("end", lambda: run.events("ended"))
    run.wait("end of every process", lambda: not processes_of(run.folder, 0))
    (end,) = run.events("ended")
    assert (end["outcome"], end["next"], end["lost"]) == ("failed", "requeue", {"1": host})
    logs = run.folder / "logs" / "attempt-0"
    assert f"The agent on {host} (node 1) recorded no exit code." in (logs / "batch.log").read_text()
    failure = read_failure(RunFolder(run.folder), 0)
    assert failure is not None
    assert f"node 1 ({host}) was lost" in failure.sentence
    run.wait("second attempt", lambda: of_attempt(run.records("metrics.jsonl"), 1))
    command("cancel", run.folder.name)


def test_ranks_that_hear_nothing_leave_before_slurm_kills_them(command: Command) -> None:
    """Rank 0, in a collective, leaves by its guard; rank 1, whose guard is stuck too, by its agent."""
    trap = command.project / "trap"
    deaf = ["data=deaf", f"+data.trap={trap}", "policy.grace_s=8"]
    run = command.submit("deaf", "nodes=2", "train.steps=100000", *SAVING, *deaf)
    run.wait("checkpoint", lambda: run.events("saved"))
    trap.write_text("0")
    run.wait("rank in the trap", trap.with_suffix(".sprung").exists)
    command.slurm("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    run.wait("end", lambda: run.events("ended"))
    (end,) = run.events("ended")
    assert (end["exit_code"], end["outcome"], end["next"]) == (75, "stopped", "requeue")
    logs = run.folder / "logs" / "attempt-0"
    assert "SLURM is about to kill it: it exits now" in (logs / "rank-0.log").read_text()
    assert (
        "SLURM is about to kill the job: the agent ends the ranks of this node"
        in (logs / "node-0.log").read_text()
    )
    assert [(logs / f"exit-node-{node}").read_text() for node in (0, 1)] == ["75\n", "75\n"]
    # The agent may kill rank 0 between the publication of a checkpoint and its event.
    saved = int((run.folder / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    run.wait("second attempt", lambda: of_attempt(run.records("metrics.jsonl"), 1))
    assert of_attempt(run.events("resumed"), 1)[0]["step"] == saved
    command("cancel", run.folder.name)
