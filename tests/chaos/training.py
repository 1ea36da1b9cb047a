"""One training on a sandbox, started and watched from outside, by command and run folder."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.environments.hostlist import expand
from slurmddp.environments.scrub import scrub
from slurmddp.errors import SlurmError
from slurmddp.runs.folder.history import History, fold
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.merged_logs import LineReader
from slurmddp.sandbox import Sandbox

POLL_S = 0.02
COMMAND_LIMIT_S = 120


@dataclass(frozen=True)
class Shape:
    """The training that is disturbed: how large, and how long."""

    nodes: int = 2
    ranks_per_node: int = 2
    steps: int = 400
    save_every: int = 10
    in_place: bool = False
    """Whether ranks that fall begin again in the same job, where that is enough."""

    def overrides(self) -> list[str]:
        """Return the words after `slurmddp train`: a tiny model whose steps take milliseconds."""
        return [
            "+cluster=sandbox",
            "model=gpt_tiny",
            "data.context=32",
            f"nodes={self.nodes}",
            f"ranks_per_node={self.ranks_per_node}",
            f"train.steps={self.steps}",
            f"train.save_every={self.save_every}",
            "train.batch_size=4",
            "train.log_every=1",
            "train.eval_every=50",
            "train.eval_batches=4",
            "train.sample_chars=0",
            "policy.max_restarts=100000",
            f"policy.max_restarts_in_place={100000 if self.in_place else 0}",
            "policy.exclude_failed_h=0",  # two nodes of three can't go without one that failed once
            "policy.signal_lead_s=20",
        ]


class Place:
    """The place of the trainings: a project folder, and the sandbox whose SLURM they run on."""

    def __init__(self, project: Path, sandbox: Sandbox) -> None:
        self.project, self.sandbox = project, sandbox
        state = {"XDG_STATE_HOME": str(project / "state")}
        self.environment = {**scrub(os.environ), **sandbox.environment(scrub(os.environ)), **state}

    def command(self, *words: str) -> str:
        """Run one `slurmddp` command and return what it printed; SlurmError when it fails."""
        process = self._begin(words)
        out, err = process.communicate(timeout=COMMAND_LIMIT_S)
        if process.returncode != 0:
            raise SlurmError(f"`slurmddp {' '.join(words)}` ended with {process.returncode}: {err}")
        return out

    def at_once(self, *commands: tuple[str, ...]) -> None:
        """Run several `slurmddp` commands at the same time; each may succeed or be refused."""
        for process in [self._begin(words) for words in commands]:
            process.communicate(timeout=COMMAND_LIMIT_S)

    def _begin(self, words: tuple[str, ...]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "slurmddp", *words],
            cwd=self.project,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


class Lines:
    """The JSON lines of a file that grows; each look reads only what is new."""

    def __init__(self, path: Path) -> None:
        self._reader = LineReader(path)
        self.records: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """Return all records so far; a line that is still being written, or is damaged, is left out."""
        for line in self._reader.read() if self._reader.path.exists() else ():
            with contextlib.suppress(ValueError):
                self.records.append(json.loads(line))
        return self.records


class Training:
    """One run of the training under watch."""

    def __init__(self, place: Place, name: str, shape: Shape) -> None:
        self.place, self.shape, self._name = place, shape, name

    @property
    def train_words(self) -> tuple[str, ...]:
        return ("train", *self.shape.overrides(), f"name={self._name}")

    @property
    def resume_words(self) -> tuple[str, ...]:
        return ("resume", self.folder.name)

    def start(self) -> None:
        """Submit it."""
        self.place.command(*self.train_words)
        (path,) = (self.place.project / "runs").glob(f"{self._name}-*")
        self.watch(RunFolder(path))

    def watch(self, folder: RunFolder) -> None:
        """Watch a run that is there already."""
        self.folder = folder
        self._events, self._metrics = Lines(folder.attempts_file), Lines(folder.metrics_file)

    def give_up(self) -> None:
        """Cancel it and wait until SLURM has ended it."""
        with contextlib.suppress(SlurmError):
            self.place.command("cancel", self.folder.name)
        self.place.sandbox.cancel_jobs()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._events.look() if event.get("event") == kind]

    def history(self) -> History:
        return fold(self._events.look())

    @property
    def finished(self) -> bool:
        newest = self.history().newest
        return newest is not None and newest.outcome == "finished"

    @property
    def attempt(self) -> int:
        """The number of the newest attempt, -1 before the first."""
        return max((event["attempt"] for event in self.events("started")), default=-1)

    @property
    def job_id(self) -> str:
        return self.history().job_id or ""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the newest attempt."""
        return expand(self.events("started")[-1]["nodes"])

    def steps(self, attempts: Callable[[int], bool]) -> list[tuple[int, float]]:
        """Return step and time of what the attempts that `attempts` names logged, in the order of writing."""
        return [
            (record["step"], record["time"])
            for record in self._metrics.look()
            if "loss" in record and attempts(record["attempt"])
        ]

    def last_step(self, attempts: Callable[[int], bool] = lambda attempt: True) -> int:
        """Return the highest step that was logged, 0 before the first."""
        return max((step for step, _ in self.steps(attempts)), default=0)

    def saved(self, attempt: int) -> bool:
        """Say whether an attempt has written a checkpoint."""
        return any(event.get("attempt") == attempt for event in self.events("saved"))

    def wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `condition`; False when it did not come within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end_word(self) -> str:
        """Say how the newest attempt stands, for a report on a run that does not continue."""
        newest = self.history().newest
        if newest is None:
            return "no attempt has started"
        if newest.ended is None:
            asked, said = ("squeue", "-h", "-t", "all", "-j", self.job_id, "-o", "%T, %r"), "no such job"
            with contextlib.suppress(SlurmError):
                said = self.place.sandbox.command(*asked).strip()
            return f"attempt {newest.number} has not ended, last step {self.last_step()}, SLURM: {said}"
        return f"attempt {newest.number} ended: {newest.outcome}, code {newest.exit_code}, next {newest.next}"


def write_project(folder: Path, text: str) -> None:
    """Make a project folder whose data is `text`, so that it is read in milliseconds."""
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "data" / "text.py").write_text(text, encoding="utf-8")
    (folder / "conf" / "slurmddp.yaml").write_text(
        f"data:\n  path: {json.dumps(str(folder / 'data'))}\n", encoding="utf-8"
    )
