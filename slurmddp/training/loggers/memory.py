"""Keep all metrics in memory, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.training.loggers.logger import LoggedRun, Logger


class MemoryLogger(Logger):
    """Logger that keeps all metrics in the dict `values`: name -> step -> value.

    Example:
        logger = MemoryLogger()
        with Distributon(loggers=[logger]).launch() as d:
            d.log_metrics({"loss": 0.5}, step=1)
        logger.values  # {"loss": {1: 0.5}}
    """

    def __init__(self) -> None:
        self.run: LoggedRun | None = None
        self.values: dict[str, dict[int, float]] = {}
        self.finished: bool | None = None
        """The argument `finished` of the call of `close`; None before it."""

    def start(self, run: LoggedRun) -> None:
        self.run = run
        self.finished = None
        # The training repeats the steps from `first_step` on, so drop their values.
        for name, values in self.values.items():
            self.values[name] = {step: value for step, value in values.items() if step < run.first_step}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.values.setdefault(name, {})[step] = value

    def close(self, finished: bool) -> None:
        self.finished = finished
