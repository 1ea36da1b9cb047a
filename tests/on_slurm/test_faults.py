"""Faults under a training on a real SLURM: dead and stuck ranks, late agents, lost nodes, cut links."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import bring_back, lose, nodes_of, own_sandbox
from support.slurm.train_project import SMALL, Command, Run, make_project, of_attempt

pytestmark = [pytest.mark.slurm, pytest.mark.shared_folder, pytest.mark.timeout(600)]

FAULTY = '''
import json
import os
import signal
import time
from pathlib import Path

import torch

from slow_data import SlowDigits
from slurmddp.training.builtin.gpt import GPT

FAULTS = {"killed": 3, "data": 1, "python": 2, "collective": 3}
"""Which rank each comes over, in this order."""
PHASES = {"data": "data", "python": "step", "collective": "step"}
STEPS, SAMPLES = 4, 16


def over(fault, trap):
    """Whether a fault has had its effect. On a slow machine the watchdog may end a rank that hangs for
    another rank's sake: then the same fault comes again."""
    if fault == "killed" or (trap / "none").exists():
        return (trap / fault).exists() or (trap / "none").exists()
    lines = (Path(os.environ["SLURMDDP_RUN_DIR"]) / "attempts.jsonl").read_text().splitlines()
    wanted = ("stalled", FAULTS[fault], PHASES[fault])
    events = (json.loads(line) for line in lines)
    return wanted in [(event["event"], event.get("rank"), event.get("phase")) for event in events]


class Plan:
    """Lets the next fault come over its rank, in its fifth step since it began."""

    def __init__(self, trap):
        self.trap = Path(trap)
        self.next = next((fault for fault in FAULTS if not over(fault, self.trap)), None)
        self.count = 0

    def come(self, *faults, after):
        self.count += 1
        if self.next in faults and FAULTS[self.next] == int(os.environ["RANK"]) and self.count > after:
            (self.trap / self.next).touch()
            return self.next
        return None


class Digits(SlowDigits):
    def __init__(self, trap, **options):
        super().__init__(**options)
        self.plan = Plan(trap)

    def __getitem__(self, index):
        fault = self.plan.come("killed", "data", after=SAMPLES)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "data":
            time.sleep(3600)
        return super().__getitem__(index)


class Model(GPT):
    def __init__(self, trap, **options):
        super().__init__(**options)
        self.plan = Plan(trap)

    def forward(self, tokens):
        fault = self.plan.come("python", "collective", after=STEPS) if self.training else None
        if fault == "python":
            while True:
                time.sleep(0.1)
        if fault == "collective":
            torch.distributed.recv(torch.zeros(1), src=0, tag=77)
        return super().forward(tokens)
'''
OWN_PYTHON = """#!/bin/sh
# The interpreter of the agents: on node 1 it comes late, or finds something wrong.
if [ "$SLURM_NODEID" = 1 ] && [ "$SLURMDDP_ATTEMPT" = 0 ]; then
    {first}
fi
exec "{python}" "$@"
"""
UNTIL_MISSED = """for second in $(seq 100); do
        grep -q "waiting for" "$3/logs/attempt-0/node-0.log" && break
        sleep 1
    done"""
SAVING = ["nodes=2", "train.save_every=10", "train.workers=0"]


@pytest.fixture(scope="module")
def faulty() -> Iterator[FaultySandbox]:
    """A SLURM that gives a silent node up soon, though later than the agents do."""
    with own_sandbox("x", nodes=3, slurmd_timeout_s=20, kill_wait_s=20) as made:
        yield made


@pytest.fixture(autouse=True)
def all_nodes_are_there(faulty: FaultySandbox) -> None:
    """Bring back the nodes that the test before has lost; without them no attempt could avoid another."""
    bring_back(faulty)


@pytest.fixture(scope="module")
def command(faulty: FaultySandbox, tmp_path_factory: pytest.TempPathFactory) -> Command:
    project = make_project(tmp_path_factory.mktemp("project"))
    (project / "conf/model").mkdir()
    (project / "faulty.py").write_text(FAULTY)
    (project / "conf/data/faulty.yaml").write_text("_target_: faulty.Digits\ncontext: 16\n")
    model = (
        "_target_: faulty.Model\nvocab_size: 98\ncontext: 16\nwidth: 32\nlayers: 2\nheads: 2\ndropout: 0.1\n"
    )
    (project / "conf/model/faulty.yaml").write_text(model)
    return Command(project, faulty.environment())


def faults(trap: Path) -> list[str]:
    own = ["model=faulty", f"+model.trap={trap}", "data=faulty", f"+data.trap={trap}"]
    return [*SAVING, *own, "train.steps=30", "train.memory_save_every=1"]


def beforehand(command: Command, first: str) -> str:
    """Return the override that makes the agent of node 1 do something first, in the first attempt."""
    script = command.project / "own-python"
    script.write_text(OWN_PYTHON.format(first=first, python=sys.executable))
    script.chmod(0o755)
    return f"cluster.python={script}"


def log_of(run: Run, name: str, attempt: int = 0) -> str:
    file = run.folder / "logs" / f"attempt-{attempt}" / name
    return file.read_text() if file.exists() else ""


def test_one_attempt_outlives_a_late_agent_a_killed_rank_and_ranks_that_stand_still(
    command: Command, tmp_path: Path
) -> None:
    """A rank is killed; one hangs in its data, one in Python, one in a receive; all restart each time."""
    whole, trap = tmp_path / "whole", tmp_path / "trap"
    for folder in (whole, trap):
        folder.mkdir()
    (whole / "none").touch()
    python = beforehand(command, UNTIL_MISSED)
    patient = ["policy.stall_timeout_s=6", "policy.max_restarts_in_place=50"]
    run = command.submit("faulty", *faults(trap), *patient, python)
    command("train", "+cluster=sandbox", "launcher=local", "name=whole", *SMALL, *faults(whole))
    run.wait_finished()
    undisturbed = Run(next((command.project / "runs").glob("whole-*")), command)
    assert run.checkpoint() == undisturbed.checkpoint()
    assert run.losses() == undisturbed.losses()
    assert {path.name for path in trap.iterdir()} == {"killed", "data", "python", "collective"}

    late = nodes_of(run, 0)[1]
    assert f"waiting for node 1 ({late})" in log_of(run, "node-0.log")
    assert [(end["attempt"], end["outcome"]) for end in run.events("ended")] == [(0, "finished")]
    restarts = run.events("restarted")
    assert [event["restart_count"] for event in restarts] == list(range(1, len(restarts) + 1))
    assert any(event["rank"] == 3 and "SIGKILL" in event["reason"] for event in restarts)
    stalls = {(event["rank"], event["phase"], event["host"]) for event in run.events("stalled")}
    first, second = nodes_of(run, 0)
    assert {(1, "data", first), (2, "step", second), (3, "step", second)} <= stalls
    stacks = [path.read_text() for path in run.folder.glob("logs/attempt-0/failure-g*.json")]
    assert all(any(line in stack for stack in stacks) for line in ("faulty.py", "__getitem__", "recv"))


def test_a_node_that_the_preflight_finds_unfit_is_left_out_of_the_next_attempt(
    faulty: FaultySandbox, command: Command
) -> None:
    """Its folder for temporary files can't be written to; nothing has been trained by then."""
    own = beforehand(command, "export TMPDIR=/proc")
    run = command.submit("unfit", "preflight=on", "train.steps=3", *SAVING, own)
    run.wait_finished()
    assert [(end["exit_code"], end["next"]) for end in run.events("ended")] == [(76, "requeue"), (0, "none")]
    unfit = nodes_of(run, 0)[1]
    assert unfit not in nodes_of(run, 1), run.story()
    assert all("UnhealthyNodeError" in log_of(run, f"rank-{rank}.log") for rank in range(4)), run.story()
    # The list may also name nodes that other runs have lost.
    (entry,) = [line for line in run.records("excluded.jsonl") if "run" not in line]
    assert (entry["node"], "TMPDIR" in entry["reason"]) == (unfit, True)
    first, second = run.events("preflight")
    assert first["failed"][0].startswith(f"{unfit}: /proc (TMPDIR) can't be written to")
    assert second["failed"] == []
    assert f"{unfit}: /proc (TMPDIR)" in log_of(run, "failure.json")


def test_agents_notice_a_cut_link_before_slurm_does_and_the_job_goes_on_elsewhere(
    faulty: FaultySandbox, command: Command
) -> None:
    run = command.submit("cut", "train.steps=100000", *SAVING)
    run.wait("checkpoint", lambda: run.events("saved"))
    cut = nodes_of(run, 0)[1]
    lose(faulty, cut)
    run.wait(
        "notice of the loss",
        lambda: "lost contact with each other: no heartbeat" in log_of(run, "node-0.log"),
    )
    run.wait("checkpoint of the second attempt", lambda: of_attempt(run.events("saved"), 1))
    assert cut not in nodes_of(run, 1)
    assert cut in {entry["node"] for entry in run.records("excluded.jsonl")}
    # SLURM, which learns of it meanwhile, may end the batch script before it can write.
    ends = [(end["outcome"], end["next"]) for end in run.events("ended")]
    assert ends in ([], [("stopped", "requeue")])
    (resumed,) = run.events("resumed")
    assert resumed["step"] >= of_attempt(run.events("saved"), 0)[0]["step"]
    command("cancel", run.folder.name)
