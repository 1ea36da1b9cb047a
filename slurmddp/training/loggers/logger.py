"""Define the interface of a logger, and the facts about the run that a logger gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CLOSE_S = 10.0
"""Seconds that all loggers of a training together have to close."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """Description of the run that a logger gets before the first metrics."""

    name: str
    """The name of the run; outside a job of slurmddp the name of the working directory."""
    folder: Path
    """The folder for files of loggers: `loggers` in the run folder, else in the working directory."""
    first_step: int = 0
    """The first step whose metrics follow; they replace metrics of earlier starts from this step on."""
    is_continued: bool = False
    """Whether to continue the experiment of an earlier start, if `folder` contains one."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration; values from the environment are shown as expressions."""


class Logger(Protocol):
    """A receiver of metrics. A subclass inherits empty methods, and so needs only `log`.

    Only rank 0 has loggers. Each logger runs in its own thread, so a call may take long. The first call that
    raises is reported, and the training continues. The constructor should only keep its arguments: it runs
    before the training.

    Example:
        class Lines(Logger):
            def log(self, metrics, step):
                print(step, metrics)
    """

    def start(self, run: LoggedRun) -> None:
        """Open the experiment, before the first metrics.

        If the training goes back to an older step, `close` is called, and then `start` again.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics: their values after `step` optimizer steps, by name."""

    def flush(self) -> None:
        """Write all values passed to `log` so far; called whenever no further metrics are queued."""

    def close(self, finished: bool) -> None:
        """End the experiment within `CLOSE_S`; `finished` is False if the training ended early."""
