"""A training that is struck by a made-up fault, as `make chaos` sees it, without SLURM."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import recovery
from chaos.faults import FAULTS, Fault, Scene, Struck
from chaos.recovery import Outcome, strike
from chaos.schedule import Planned
from chaos.training import Shape, Training
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder

PLANNED = Planned(0, "made-up", 1, "0/0")


class Story:
    """A run folder in which attempt 0 has reached step 12, and what is written into it after the fault."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        slurm = SimpleNamespace(command=lambda *words: "PENDING, launch failed requeued held\n")
        place: Any = SimpleNamespace(sandbox=slurm)
        self.training = Training(place, "story", Shape())
        self.training.watch(self.folder)
        self.time = 1000.0
        self.event("started", attempt=0, job_id="1")
        self.steps(0, 1, 12)

    def event(self, event: str, **facts: Any) -> None:
        append_line(self.folder.attempts_file, {"event": event, "time": self.time, **facts})

    def steps(self, attempt: int, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.time += 1
            record = {"step": step, "attempt": attempt, "time": self.time, "loss": 1.0}
            append_line(self.folder.metrics_file, record)

    def strike(
        self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], bool | None], **facts: Any
    ) -> Outcome | None:
        def inject(scene: Scene, luck: random.Random) -> Struck:
            at = self.time
            return Struck("made up", at, act(), **facts)

        monkeypatch.setitem(FAULTS, "made-up", Fault("made-up", "", inject))
        monkeypatch.setattr(recovery.time, "time", lambda: self.time)
        return strike(Scene(None, self.training), PLANNED, 0.2)  # type: ignore[arg-type]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)
