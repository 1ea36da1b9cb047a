"""Frameworks that save in their own way when they are asked to stop: nothing is lost after a resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.environments.scrub import scrub
from slurmddp.runs.folder.layout import RunFolder
from support.frameworks import stops
from support.runs.agent_runs import events, wait_until
from support.runs.train_runs import only_run, slurmddp

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]

SHORT = ("lightning", "flag")
"""The scripts that `make test` stops. The others take longer: `pytest -m slow` beside this file."""
SCRIPTS = {
    "lightning": ["lightning_exception.py"],
    "lightning as a command": ["--", sys.executable, "lightning_exception.py"],
    "transformers": ["hf_jit.py"],
    "accelerate": ["accelerate_flag.py"],
    "fabric": ["fabric_flag.py"],
    "flag": ["handlers.py", "flag"],
    "exit in the handler": ["handlers.py", "exit"],
}


def case(name: str, way: str) -> Any:
    return pytest.param(name, way, marks=() if name in SHORT and way == "stop" else pytest.mark.slow)


def steps_of(run: RunFolder, rank: int) -> list[int]:
    """Return the steps that a rank has taken, those after a resume included."""
    file = run.path / f"own/steps-{rank}"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.mark.parametrize(
    ("name", "way"), [case(name, way) for name in SCRIPTS for way in ("stop", "SIGTERM", "cancel")]
)
def test_a_framework_saves_when_it_is_asked_to_stop_and_loses_no_step(
    tmp_path: Path, name: str, way: str
) -> None:
    shutil.copytree(Path(stops.__file__).parent, tmp_path, dirs_exist_ok=True)
    environment = {**scrub(os.environ), "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    words = ["run", "launcher=local", "nodes=2", "-n", "1", "name=fit"]
    training = subprocess.Popen(
        [sys.executable, "-m", "slurmddp", *words, *SCRIPTS[name]],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: training.poll() is not None or [*tmp_path.glob("runs/*/logs/*")], "a run folder")
        run = only_run(tmp_path)
        wait_until(lambda: training.poll() is not None or len(steps_of(run, 1)) >= 3, "steps")
        if way == "SIGTERM":
            training.send_signal(signal.SIGTERM)
        else:
            slurmddp(tmp_path, way, run.name)
        output, _ = training.communicate(timeout=120)
    finally:
        training.kill()
        training.wait()
    logs = "".join(log.read_text() for log in run.log_dir(0).glob("*.log"))
    assert training.returncode == 75, output + logs
    slurmddp(tmp_path, "resume", run.name)
    outcome = "cancelled" if way == "cancel" else "stopped"
    assert [event["outcome"] for event in events(run, "ended")] == [outcome, "finished"]
    for rank in range(2):
        taken = steps_of(run, rank)
        # The Trainer of transformers saves before the update of its last step, and repeats that step.
        repeated = int(name == "transformers")
        assert sorted(set(taken)) == [*range(1, max(taken) + 1)], json.dumps(taken)
        assert len(taken) - len(set(taken)) <= repeated, json.dumps(taken)
