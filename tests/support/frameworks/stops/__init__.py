"""Scripts of frameworks that save at a request to stop, each by the means of its framework."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.runs.agent_runs import wait_until

WAITS_AT = 4
"""The step after which the ranks of the first attempt wait (see `steps.py`)."""
SCRIPTS: Mapping[str, Sequence[str]] = {
    "lightning": ["lightning_exception.py"],
    "lightning-command": ["--", sys.executable, "lightning_exception.py"],
    "transformers": ["hf_jit.py"],
    "accelerate": ["accelerate_flag.py"],
    "fabric": ["fabric_flag.py"],
    "flag": ["handlers.py", "flag"],
    "exit": ["handlers.py", "exit"],
}
"""The end of a `slurmddp run` command for each script."""


def write_scripts(project: Path) -> None:
    """Copy all scripts into a project folder."""
    shutil.copytree(Path(__file__).parent, project, ignore=shutil.ignore_patterns("__*"), dirs_exist_ok=True)


def steps_of(run: Path, rank: int) -> list[int]:
    """Return the steps that a rank has taken, including steps after a resume."""
    file = run / f"own/steps-{rank}"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def wait_for_steps(run: Path) -> None:
    """Wait until both ranks have taken step WAITS_AT, after which they wait for a signal."""
    wait_until(lambda: all(len(steps_of(run, rank)) == WAITS_AT for rank in range(2)), f"steps of {run.name}")


def go_on(run: Path) -> None:
    """Let the ranks of two nodes continue once all have got a signal: Lightning's handler is a collective."""
    logs = [run / f"logs/attempt-0/node-{node}.log" for node in range(2)]
    wait_until(
        lambda: all("passed on to the ranks" in log.read_text() for log in logs), "a signal on each node"
    )
    (run / "own/go").touch()


def check_no_step_is_lost(run: Path, name: str, ranks: int, stops: int = 1) -> None:
    """Check that each rank has taken each step, and repeated none, after a number of stops.

    The Trainer of transformers saves before the update of its last step, and repeats that step.
    """
    for rank in range(ranks):
        taken = steps_of(run, rank)
        assert sorted(set(taken)) == [*range(1, max(taken) + 1)], taken
        assert len(taken) - len(set(taken)) <= stops * (name == "transformers"), taken
