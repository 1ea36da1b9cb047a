"""Record events, losses and rates of a training in the run folder and for loggers, on rank 0."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from slurmddp.checkpoint.files.manifest import folder_name, newest_step
from slurmddp.errors import ConfigError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.runs.folder.config_secrets import for_readers
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.settings.identity import relevant
from slurmddp.training.loggers.logger import LoggedRun, Logger
from slurmddp.training.loggers.logger_threads import Loggers, build
from slurmddp.training.startup_timer import StartupTimer
from slurmddp.training.stopping.agreement import StopReason
from slurmddp.training.stopping.stop_controller import StopController

log = logging.getLogger(__name__)

_RESERVED_NAMES = ("step", "attempt", "time")
"""Names that no metric may have: slurmddp writes them itself in each line of `metrics.jsonl`."""


class RunLog:
    """Writer of an attempt's events and metrics to run folder and loggers; writes only if `active`."""

    def __init__(
        self, run: RunContext, *, active: bool, unit: str = "samples", loggers: Loggers | None = None
    ) -> None:
        self._run = run
        self._active = active
        self._unit = unit
        self._loggers = loggers or Loggers()

    def event(self, event: str, **facts: Any) -> None:
        """Add an event with the values `facts` to `attempts.jsonl` in the run folder."""
        if self._writable() is not None:
            self._run.add_event(event, **facts)

    def step(self, step: int, *, rate: float, **values: float) -> None:
        """Log values such as loss and learning rate after `step`, and the speed.

        Args:
            step: the number of completed steps.
            rate: units (such as samples) per second.
            values: further values by name.
        """
        self._log(step, {**values, f"{self._unit}_per_s": round(rate, 1)})

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of metrics, by name, after `step` completed steps."""
        self._log(step, values)

    def sample(self, text: str) -> None:
        """Write a text that the model generated to the run folder."""
        folder = self._writable()
        if folder is not None:
            write_atomic(folder.sample_file, text)

    def _writable(self) -> RunFolder | None:
        """Return the run folder; None if there is no run folder, or this rank does not write to it.

        Raises:
            SupersededError: a later attempt of the run has started.
        """
        if not self._active:
            return None

        self._run.refuse_superseded()
        return self._run.folder

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line to `metrics.jsonl` in the run folder, and pass the values to the loggers."""
        folder = self._writable()
        if folder is not None:
            origin = {"step": step, "attempt": self._run.attempt, "time": round(time.time(), 3)}
            append_line(folder.metrics_file, {**origin, **values})

        if self._active:
            self._loggers.log(values, step)


def loggers_of(run: RunContext, given: Sequence[Logger], config: Mapping[str, Any] | None) -> Loggers:
    """Return the loggers of rank 0: the loggers of the run's configuration, and the loggers of the program.

    Args:
        run: the run of this process.
        given: the loggers of the program.
        config: the argument `config` of Distributon, which the loggers get with the run's configuration.

    Raises:
        ConfigError: a logger is unknown, its library is missing, or it does not take its options.
    """
    folder = run.folder
    settings = {}
    if folder is not None and folder.config_file.is_file():
        settings = folder.config()

    facts = LoggedRun(
        name=Path.cwd().name if folder is None else folder.name,
        folder=Path("loggers").absolute() if folder is None else folder.loggers_dir,
        is_continued=folder is not None,
        config={**relevant(for_readers(settings)), **(config or {})},
    )

    def warn(text: str) -> None:
        if folder is None:
            log.warning(text)
        RunLog(run, active=True).event("warned", about="logger", text=text)

    return Loggers(
        build(settings.get("loggers"), given),
        facts,
        is_stopped=lambda: StopController.is_leaving or hasattr(sys, "last_type"),
        warn=warn,
    )


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers, by name; the call waits for tensors on a GPU.

    Raises:
        ConfigError: a value is not a single number, or a name is `step`, `attempt` or `time`.
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ConfigError(
            f"{metrics!r:.80} is not a mapping from names to numbers.", hint='Give a dict: {"loss": 0.5}.'
        )

    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    if name in _RESERVED_NAMES:
        raise ConfigError(
            f"A metric is named {name!r}, but slurmddp itself records a value of this name.",
            hint="Choose another name for the metric.",
        )

    if getattr(value, "ndim", None) is not None and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigError(
            f"The metric {name!r} is a {type(value).__name__}{shape}, not one number.",
            hint="Give an int, a float, or a tensor with one element, such as its mean().",
        )

    return value


class Milestones:
    """Recorder of three events of a training in the run folder: its resume, its first step, its stop.

    Resume and stop are recorded only after `open` was called with the checkpoint folder of the run, because
    the program may also load checkpoints from other folders.
    """

    _counted: ClassVar[set[tuple[str, int]]] = set()
    """Run folder and attempt of each first step that was recorded without `open`. A program may train twice,
    but the attempt has only one first step."""

    def __init__(self, run: RunContext, start_up: StartupTimer) -> None:
        self._run = run
        self._start_up = start_up
        self._journal = RunLog(run, active=False)
        self._loads = False
        """Whether the training has loaded from the checkpoint folder of the run."""
        self._has_step = False
        self._has_stop = False
        self.rank = -1
        """The rank of this process; -1 before its launch."""

    def open(self, root: Path) -> int | None:
        """Record resume and stop from now on, if `root` is the checkpoint folder of the run.

        Returns:
            On rank 0, the step of the newest checkpoint in `root`. None if there is none, if `root` is
            another folder, and on other ranks.
        """
        self._start_up.lap("model")
        if not self._run.keeps(root):
            return None

        self._journal = RunLog(self._run, active=self.rank == 0)
        self._loads = True
        if self.rank != 0:
            return None
        # Ignore an OSError here: `restore.load` lists the folder again, and raises the error on all ranks.
        with suppress(OSError):
            return newest_step(root)
        return None

    def resumed(self, newest: int | None, used: int | None, source: str | None) -> None:
        """Record from which step training resumes, and warn if a newer checkpoint can't be used.

        Args:
            newest: the step of the newest checkpoint, the result of `open`.
            used: the step of the checkpoint that was loaded, None if none was loaded.
            source: where it was loaded from, "memory" or "disk".
        """
        self._start_up.lap("checkpoint")
        if newest is not None and (used is None or used < newest):
            consequence = f". The training resumes from step {used}, the newest that verifies"
            if used is None:
                consequence = ", nor can any before it. The training starts at step 0"
            text = (
                f"Checkpoint {folder_name(newest)} can't be used{consequence}. "
                "`slurmddp checkpoints RUN` lists the checkpoints, the log contains the reason."
            )
            self._journal.event("warned", about="checkpoint", text=text)

        if used is not None:
            self._journal.event("resumed", step=used, **{"from": source})

    def step(self, step: int) -> None:
        """Record the first step of this process, with the durations of the phases before it."""
        if self._has_step:
            return
        self._has_step = True

        self._start_up.lap("first_step")
        facts = {"step": step, "phases": self._start_up.seconds}
        attempt = (str(self._run.folder and self._run.folder.path), self._run.attempt)
        if self._loads:
            self._journal.event("first_step", **facts)
        elif attempt not in self._counted:
            self._counted.add(attempt)
            RunLog(self._run, active=self.rank == 0).event("first_step", **facts, loads=False)

    def stopped(self, reason: StopReason | None) -> None:
        """Record a stop and its reason; only the first call has an effect."""
        if not self._has_stop:
            self._has_stop = True
            reason = reason or StopReason("request", "a request")
            self._journal.event("signalled", signal=reason.source, rank=reason.rank)


class Stopwatch:
    """Stopwatch for samples (or other units) per second; time between `stop` and `start` does not count."""

    def __init__(self) -> None:
        self._work = 0
        self._seconds = 0.0
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self, work: int) -> None:
        """Stop, and count `work` units as done since `start`."""
        self._work += work
        self._seconds += time.perf_counter() - self._since

    def take_rate(self) -> float:
        """Return units per second since the last call of this method, and reset; 0.0 without any time."""
        rate = self._work / self._seconds if self._seconds else 0.0
        self._work = 0
        self._seconds = 0.0
        return rate
