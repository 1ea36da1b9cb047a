"""Frameworks that save in their own way when they are asked to stop: nothing is lost after a resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.environments.scrub import scrub
from support.frameworks.stops import SCRIPTS, check_no_step_is_lost, go_on, wait_for_steps, write_scripts
from support.runs.agent_runs import events, wait_until
from support.runs.train_runs import only_run, slurmddp

# Ranks are real programs: the agent looks at their signal handlers.
pytestmark = pytest.mark.distributed

SHORT = ("lightning", "flag")
"""The scripts that `make test` stops. The others take longer: `pytest -m slow` beside this file."""


def case(name: str, way: str) -> Any:
    return pytest.param(name, way, marks=() if name in SHORT and way == "stop" else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "way"), [case(name, way) for name in SCRIPTS for way in ("stop", "SIGTERM", "cancel")]
)
def test_a_framework_saves_when_it_is_asked_to_stop_and_loses_no_step(
    tmp_path: Path, name: str, way: str
) -> None:
    write_scripts(tmp_path)
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
        wait_for_steps(run.path)
        if way == "SIGTERM":
            training.send_signal(signal.SIGTERM)
        else:
            slurmddp(tmp_path, way, run.name)
        go_on(run.path)
        output, _ = training.communicate(timeout=120)
    finally:
        training.kill()
        training.wait()
    logs = "".join(log.read_text() for log in run.log_dir(0).glob("*.log"))
    assert training.returncode == 75, output + logs
    slurmddp(tmp_path, "resume", run.name)
    outcome = "cancelled" if way == "cancel" else "stopped"
    assert [event["outcome"] for event in events(run, "ended")] == [outcome, "finished"]
    check_no_step_is_lost(run.path, name, ranks=2)
