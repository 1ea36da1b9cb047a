"""What rank 0 writes down while it trains: events, losses and rates; other ranks stay silent."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from slurmddp.environments.names import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmddp.runs.folder.fence import refuse_superseded
from slurmddp.runs.folder.layout import RunFolder, append_line, write_atomic


def run_with(root: Path) -> RunFolder | None:
    """Return the run folder around this process if the run's checkpoints are in `root`; else None."""
    run_dir, attempt = os.environ.get(RUN_DIR_VARIABLE), os.environ.get(ATTEMPT_VARIABLE)
    if not run_dir or not attempt:
        return None
    folder = RunFolder(run_dir)
    return folder if os.path.realpath(root) == os.path.realpath(folder.checkpoints_dir) else None


class Journal:
    """The records of one attempt in its run folder; with `active` False every call does nothing."""

    def __init__(self, folder: RunFolder, *, active: bool, unit: str = "samples") -> None:
        self._folder, self._active, self._unit = folder, active, unit
        self._attempt = int(os.environ.get(ATTEMPT_VARIABLE) or 0)

    def event(self, event: str, **facts: Any) -> None:
        """Add an event to `attempts.jsonl`."""
        if self._may_write():
            self._folder.add_event(event, attempt=self._attempt, **facts)

    def step(self, step: int, *, loss: float, lr: float, rate: float) -> None:
        """Add a line about the steps since the last one to `metrics.jsonl`; `rate` is units per second."""
        self._line({"step": step}, {"loss": loss, "lr": lr, f"{self._unit}_per_s": round(rate, 1)})

    def evaluation(self, step: int, loss: float) -> None:
        """Add the held-out loss after `step` to `metrics.jsonl`."""
        self._line({"step": step}, {"eval_loss": loss})

    def sample(self, text: str) -> None:
        """Keep the text that the model wrote."""
        if self._may_write():
            write_atomic(self._folder.sample_file, text)

    def _may_write(self) -> bool:
        """Whether this rank is the one that writes; raises SupersededError when its attempt is a past one."""
        if self._active:
            refuse_superseded(os.environ)
        return self._active

    def _line(self, step: dict[str, Any], facts: dict[str, Any]) -> None:
        if self._may_write():
            place = {"attempt": self._attempt, "time": round(time.time(), 3)}
            append_line(self._folder.metrics_file, step | place | facts)


class Stopwatch:
    """Adds up work and the time it took, leaving out what happens between `stop` and `start`."""

    def __init__(self) -> None:
        self._work, self._seconds, self._since = 0, 0.0, time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self, work: int) -> float:
        """Count `work` units as done since `start`; return the seconds since then."""
        seconds = time.perf_counter() - self._since
        self._work += work
        self._seconds += seconds
        return seconds

    def take_rate(self) -> float:
        """Return units per second since the last call, and begin again."""
        rate = self._work / self._seconds if self._seconds else 0.0
        self._work, self._seconds = 0, 0.0
        return rate
