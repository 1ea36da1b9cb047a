"""A training that is struck by a made-up fault, as `make chaos` sees it, without SLURM."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import recovery
from chaos.faults import FAULTS, Fault, Planned, Scene, Struck
from chaos.recovery import Outcome, strike
from chaos.training import Shape, Training
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder

PLANNED = Planned(0, "made-up", 1, "0/0")


class Story:
    """A run folder in which attempt 0 has reached step 12, and what is written into it after the fault."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = RunFolder(path), monkeypatch
        slurm = SimpleNamespace(command=lambda *words: "PENDING, launch failed requeued held\n")
        place: Any = SimpleNamespace(sandbox=slurm)
        self.training = Training(place, "story", Shape())
        self.training.watch(self.folder)
        self.time = 1000.0
        self.resume_by_hand(lambda *_: False)
        self.event("started", attempt=0, job_id="1")
        self.steps(0, 1, 12)

    def event(self, event: str, **facts: Any) -> None:
        append_line(self.folder.attempts_file, {"event": event, "time": self.time, **facts})

    def steps(self, attempt: int, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.time += 1
            record = {"step": step, "attempt": attempt, "time": self.time, "loss": 1.0}
            append_line(self.folder.metrics_file, record)

    def resume_by_hand(self, does: Callable[..., bool]) -> None:
        self._monkeypatch.setattr(recovery, "_resume_by_hand", does)

    def strike(self, act: Callable[[], bool | None], **facts: Any) -> Outcome | None:
        def inject(scene: Scene, luck: random.Random) -> Struck:
            at = self.time
            return Struck("made up", at, act(), **facts)

        self._monkeypatch.setitem(FAULTS, "made-up", Fault("made-up", "", inject))
        self._monkeypatch.setattr(recovery.time, "time", lambda: self.time)
        return strike(Scene(None, self.training), PLANNED, 0.2)  # type: ignore[arg-type]

    def outcome(self, act: Callable[[], bool | None], **facts: Any) -> Outcome:
        """Strike, for a fault that counts."""
        found = self.strike(act, **facts)
        assert found is not None
        return found


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    return Story(tmp_path, monkeypatch)
