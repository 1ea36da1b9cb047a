"""A batch script dies while the agents live: the run continues without help."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import nodes_of
from support.slurm.train_project import UNHURRIED, Command, Run, make_project

pytestmark = pytest.mark.slurm

COMMON = ["nodes=2", "ranks_per_node=1", "train.steps=40", "train.save_every=5", UNHURRIED]


def begin(sandbox: FaultySandbox, tmp_path: Path, name: str, *overrides: str) -> Run:
    command = Command(make_project(tmp_path / "project"), sandbox.environment())
    run = command.submit(name, *COMMON, *overrides)
    run.wait("checkpoint", lambda: run.events("saved"))
    return run


def test_a_live_batch_host_that_is_set_down_by_hand(sandbox: FaultySandbox, tmp_path: Path) -> None:
    run = begin(sandbox, tmp_path, "down", "elastic=true")
    (first, _) = nodes_of(run, 0)
    sandbox.command("scontrol", "update", f"NodeName={first}", "State=DOWN", "Reason=test")
    run.wait_finished()
    assert first not in nodes_of(run, 1)
    assert run.records("excluded.jsonl")[0]["node"] == first
    assert run.events("resumed")[0]["step"] >= 5


def test_a_batch_script_that_is_killed_alone(sandbox: FaultySandbox, tmp_path: Path) -> None:
    run = begin(sandbox, tmp_path, "killed")
    script = f"job{int(run.job_id):05d}/slurm_script"
    (pid,) = (
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if script in " ".join(process.info["cmdline"] or ())
        and (process.info["environ"] or {}).get("SLURM_CONF") == sandbox.environment()["SLURM_CONF"]
        and script not in " ".join(process.parent().cmdline() if process.parent() else ())
    )
    psutil.Process(pid).kill()
    run.wait_finished()
    assert [(end["outcome"], end["next"]) for end in run.events("ended")] == [
        ("stopped", "requeue"),
        ("finished", "none"),
    ]
    assert [event["restart_count"] for event in run.events("started")] == [0, 1]
    assert run.records("excluded.jsonl") == [], "no node has failed"
