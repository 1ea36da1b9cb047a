"""The run of one of SLURM's commands, and the rows of squeue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmddp.slurm.command import run_command
from slurmddp.slurm.command_output import parse_queue
from support.runs.agent_runs import runs, wait_until


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site may wrap SLURM's commands in scripts."""
    wrapper = tmp_path / "scontrol"
    wrapper.write_text("#!/bin/bash\nsleep 600 &\necho $! >child\nwait\n")
    wrapper.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    child, timeout_s = tmp_path / "child", 0.5
    while not (child.exists() and child.read_text()):  # On a busy machine the child takes its time to start.
        timeout_s *= 2
        result = run_command(["scontrol", "show", "config"], os.environ, timeout_s)
        assert result.is_retryable and result.code
    wait_until(lambda: not runs(int(child.read_text())), "the child of scontrol has ended")


def test_a_command_that_is_missing_is_a_refusal() -> None:
    result = run_command(["scontrol"], {"PATH": "/nowhere"}, 9.0)
    assert result.code == 127 and not result.is_retryable


@pytest.mark.parametrize(
    ("rest", "comment", "script"),
    [
        ("|/runs/gpt-1/job.sbatch t:1", "", "/runs/gpt-1/job.sbatch t:1"),
        ("mine|too|/runs/a|b/job.sbatch", "mine|too", "/runs/a|b/job.sbatch"),
        ("mine|too|(null)", "mine|too", "(null)"),
    ],
)
def test_a_row_of_squeue_may_hold_bars(rest: str, comment: str, script: str) -> None:
    text = f"*** Maintenance on 1 May ***\n7_3|RUNNING|n[1-2]|None|N/A|{rest}\n"
    (job,) = parse_queue(text)
    assert (job.job_id, job.number, job.state, job.nodes) == ("7_3", "7", "RUNNING", "n[1-2]")
    assert (job.comment, job.script) == (comment, script)
