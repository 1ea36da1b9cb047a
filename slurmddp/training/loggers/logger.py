"""The contract of a logger, and the facts about the run that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CLOSE_S = 10.0
"""Seconds that all loggers of a training have for their end, together."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The run whose metrics follow."""

    name: str
    """The name of the run; outside a job of slurmddp the name of the working directory."""
    folder: Path
    """The folder for files of loggers: `loggers` in the run folder, else in the working directory."""
    first_step: int = 0
    """Earlier starts may have logged this step and later ones; their values are replaced by those to come."""
    is_continued: bool = False
    """Whether to continue the experiment that an earlier start has left in `folder`, if there is one."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration; values from the environment are shown as expressions."""


class Logger(Protocol):
    """A receiver of metrics. A subclass inherits empty methods, and so needs only `log`.

    Only rank 0 has loggers. Each one runs in a thread of its own, so a call may take long. A call that raises
    is reported once, and the training continues. The constructor should only keep its arguments: it runs
    before the training.

    Example:
        class Lines(Logger):
            def log(self, metrics, step):
                print(step, metrics)
    """

    def start(self, run: LoggedRun) -> None:
        """Open the experiment, before the first metrics.

        The call comes again, after `close`, if the training goes back to an older step.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the values after `step` optimizer steps, each under its name."""

    def flush(self) -> None:
        """Write what was taken; called whenever no further metrics wait."""

    def close(self, finished: bool) -> None:
        """End the experiment within `CLOSE_S`; `finished` is False if the training ended early."""
