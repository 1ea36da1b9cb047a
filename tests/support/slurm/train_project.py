"""Runs of the `slurmddp` command on the sandbox: a project folder, the command, waiting for a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A slow data set, so that a run lasts long enough to be interrupted. Only the ranks of the first attempt are
# as slow as `delay_s`. So an interruption may come late, and the run still ends soon after it.
SLOW_DATA = '''
import os
import time

import torch


class SlowDigits(torch.utils.data.Dataset):
    """Sequences that count upwards; each takes `delay_s` to fetch, or less after an interruption."""

    def __init__(self, size=4096, context=16, delay_s=0.01):
        self.size, self.context = size, context
        counts = ("SLURMDDP_ATTEMPT", "SLURMDDP_RESTART_COUNT")
        was_interrupted = any(os.environ.get(count, "0") != "0" for count in counts)
        self.delay_s = min(delay_s, 0.01) if was_interrupted else delay_s

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.delay_s)
        tokens = (torch.arange(self.context + 1) + index * 7) % 98
        return tokens[:-1], tokens[1:]
'''

UNHURRIED = "+data.delay_s=0.1"
"""Makes a step of the first attempt take 0.4 s, so that a test has time to examine and interrupt it."""

SMALL = [
    "model=gpt_tiny",
    "data=slow",
    "train.batch_size=4",
    "train.log_every=1",
    "train.eval_every=1000",
    "train.save_every=1000",
]


def make_project(folder: Path) -> Path:
    """Write a user's project: a data set in a module, named by a config file in `conf/`."""
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "slow_data.py").write_text(SLOW_DATA)
    (folder / "conf/data/slow.yaml").write_text("_target_: slow_data.SlowDigits\ncontext: 16\n")
    return folder


class Command:
    """The `slurmddp` command, typed in a project folder with the sandbox's SLURM in the environment."""

    def __init__(self, project: Path, environment: dict[str, str]) -> None:
        self.project = project
        self.environment = {**os.environ, **environment, "XDG_STATE_HOME": str(project / "state")}

    def __call__(self, *arguments: str, cwd: Path | None = None, code: int | None = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "slurmddp", *arguments],
            cwd=cwd or self.project,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert code is None or done.returncode == code, (
            f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout + done.stderr

    def slurm(self, *arguments: str) -> str:
        done = subprocess.run(arguments, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, name: str, *overrides: str) -> Run:
        self("train", "+cluster=sandbox", f"name={name}", *SMALL, *overrides)
        (folder,) = (self.project / "runs").glob(f"{name}-*")
        return Run(folder, self)


class Run:
    """A run folder, as another process sees it."""

    def __init__(self, folder: Path, command: Command) -> None:
        self.folder = folder
        self.command = command

    def records(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.strip()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.records("attempts.jsonl") if event["event"] == kind]

    @property
    def job_id(self) -> str:
        return str(self.events("submitted")[-1]["job_id"])

    def steps(self) -> int:
        return max((line["step"] for line in self.records("metrics.jsonl") if "loss" in line), default=-1)

    def wait(self, what: str, condition: Callable[[], object], timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} within {timeout_s} s\n{self.story()}")
            time.sleep(0.2)

    def wait_finished(self, timeout_s: float = 300) -> None:
        self.wait("end", lambda: [e for e in self.events("ended") if e["outcome"] == "finished"], timeout_s)

    def wait_step(self, step: int, timeout_s: float = 240) -> None:
        self.wait(f"step {step}", lambda: self.steps() >= step, timeout_s)

    def checkpoint(self) -> dict[str, bytes]:
        newest = self.folder / "checkpoints" / (self.folder / "checkpoints/latest").read_text().strip()
        return {name: (newest / name).read_bytes() for name in ("state.safetensors", "state.json")}

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.records("metrics.jsonl") if "loss" in line}

    def story(self) -> str:
        files = [*self.folder.glob("attempts.jsonl"), *sorted(self.folder.glob("logs/**/*.*"))]
        parts = [f"--- {file.relative_to(self.folder)}\n{file.read_text()[-1500:]}" for file in files]
        parts.append(self.command.slurm("squeue", "--states=all"))
        return "\n".join(parts)


def of_attempt(records: list[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    return [record for record in records if record.get("attempt") == attempt]


def occupy(command: Command, seconds: int = 2) -> None:
    """Submit a job of higher priority that needs every node."""
    nodes = command.slurm("sinfo", "-h", "-p", "high", "-o", "%D").split()[0]
    submission = ["sbatch", "--parsable", "--partition=high", f"--nodes={nodes}", "--exclusive"]
    command.slurm(*submission, "--output=/dev/null", f"--wrap=sleep {seconds}")
