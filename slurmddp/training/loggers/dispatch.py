"""Pass metrics to all loggers, each in its own thread, so that no logger can delay or end the training."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.settings.loggers import NAMED, targets
from slurmddp.training.instantiate import instantiate
from slurmddp.training.loggers.logger import CLOSE_S, LoggedRun, Logger

log = logging.getLogger(__name__)

_NAMED = {named.target for named in NAMED.values()}
"""The import paths of the built-in loggers."""
_METHODS = ("start", "log", "flush", "close")
_WAITING = 10_000
"""The largest number of calls that wait for a logger; further values are dropped."""


def build(*values: Any) -> list[Logger]:
    """Return the loggers that several values of `loggers` name; a built-in logger is returned only once.

    Args:
        values: each a value as for `settings.loggers.targets`, which may also contain objects.

    Raises:
        ConfigError: a logger is unknown, its library is missing, or it lacks a method.
    """
    built: dict[str, Logger] = {}
    for value in values:
        for logger in _instances(value):
            path = f"{type(logger).__module__}.{type(logger).__qualname__}"
            key = path if path in _NAMED else str(id(logger))
            built.setdefault(key, _checked(logger))

    return list(built.values())


def _instances(value: Any) -> list[Any]:
    """Return the loggers of a value of `loggers`: create those that it names, keep its objects."""
    items: Sequence[Any] = [value]
    if value is None:
        items = []
    elif isinstance(value, (list, tuple)):
        items = value

    objects = [item for item in items if not isinstance(item, (str, Mapping))]
    named = value
    if objects:
        named = [item for item in items if isinstance(item, (str, Mapping))]
    created = [instantiate(target, _key_=key) for key, target in targets(named).items()]
    return [*created, *objects]


def _checked(logger: Any) -> Logger:
    """Return the logger; raise ConfigError if it is a class or lacks a method."""
    missing = [name for name in _METHODS if not callable(getattr(logger, name, None))]
    if missing or isinstance(logger, type):
        lacks = "is a class, not an object" if isinstance(logger, type) else f"has no method {missing[0]!r}"
        raise ConfigError(
            f"The logger {logger!r:.80} {lacks}.",
            hint="Derive its class from slurmddp.training.loggers.Logger, which has empty ones.",
        )

    return logger  # type: ignore[no-any-return]


class Loggers:
    """The loggers of this process. Their threads start with the first metrics.

    Args:
        loggers: loggers that are not started yet.
        run: the run whose metrics follow; `first_step` is set at each start.
        is_stopped: returns whether the training ends before its last step; called at the end.
        warn: reports a line about a logger that fails.
    """

    def __init__(
        self,
        loggers: Sequence[Logger] = (),
        run: LoggedRun | None = None,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
        warn: Callable[[str], object] = log.warning,
    ) -> None:
        self._run = run
        self._is_stopped = is_stopped
        self._warn = warn
        self._threads = [_LoggerThread(logger, self._report, self.close) for logger in loggers]
        self._resumed: int | None = None
        """The step of the loaded state."""
        self._has_started = False
        self._is_closed = False
        self._pid = os.getpid()

    def resumed(self, step: int | None) -> None:
        """Take the step of a loaded state, or None; the next metrics start the loggers again."""
        self._resumed = step
        self._has_started = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass the values after `step` to all loggers, without waiting for them."""
        # A forked child has none of the threads.
        if not self._threads or self._is_closed or os.getpid() != self._pid:
            return

        if not self._has_started and self._run is not None:
            self._has_started = True
            run = self._run_of_start(self._run, step)
            for thread in self._threads:
                thread.start(run)

        for thread in self._threads:
            thread.log(dict(metrics), step)

    def _run_of_start(self, run: LoggedRun, step: int) -> LoggedRun:
        """Return the run for a start whose first values come after `step`."""
        if self._resumed is None:
            return replace(run, first_step=step)

        # The training repeats the values after the loaded state. Values of the state's own step, which an
        # earlier start has logged, are not repeated.
        first_step = step
        if step >= self._resumed:
            first_step = self._resumed + 1
        return replace(run, first_step=first_step, is_continued=True)

    def close(self) -> None:
        """End all loggers; return after `CLOSE_S` at the latest. Later calls do nothing."""
        if self._is_closed or os.getpid() != self._pid:
            return

        self._is_closed = True
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.close(finished=not self._is_stopped())
        # All loggers end at the same time.
        for thread in self._threads:
            thread.wait(deadline)

    def _report(self, text: str) -> None:
        try:
            self._warn(text)
        except Exception:
            # The warning can't be recorded: a full disk, or a later attempt of the run.
            log.warning(text)


class _LoggerThread:
    """A logger and the calls that wait for it, which its thread makes one after the other.

    Args:
        logger: the logger.
        report: reports a line about a failure.
        close_all: ends all loggers of the training; called when the process exits.
    """

    def __init__(
        self, logger: Logger, report: Callable[[str], object], close_all: Callable[[], object]
    ) -> None:
        self.name = f"The logger {type(logger).__name__}"
        self._logger = logger
        self._report = report
        self._close_all = close_all
        self._calls: queue.Queue[Callable[[], object]] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._is_open = False
        self._has_reported = False
        self._ends = False

    def start(self, run: LoggedRun) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"slurmddp-{self.name}", daemon=True)
            self._thread.start()

        self._put(lambda: self._open(run))

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._put(lambda: self._log(metrics, step))

    def close(self, *, finished: bool) -> None:
        # The end must find room in the queue of a logger that hangs.
        if self._calls.full():
            with suppress(queue.Empty):
                self._calls.get_nowait()

        self._put(lambda: self._end(finished))

    def wait(self, deadline: float) -> None:
        """Wait until the thread has ended, or until `deadline` on the monotonic clock."""
        if self._thread is None:
            return

        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"did not end within {CLOSE_S:g} s, so its last values may be missing")

    def _put(self, call: Callable[[], object]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"hangs: {_WAITING} calls wait for it, further values are dropped")

    def _work(self) -> None:
        while not self._ends:
            call = self._calls.get()
            try:
                call()
                if self._calls.empty() and self._is_open:
                    self._logger.flush()
            except (Exception, SystemExit) as error:
                log.debug("%s", self.name, exc_info=error)
                text = " ".join(str(error).split())[:300]
                self._fail(f"failed: {type(error).__name__}: {text}".rstrip(": "))

    def _open(self, run: LoggedRun) -> None:
        if self._is_open:
            self._logger.close(finished=False)

        self._is_open = False
        self._logger.start(run)
        self._is_open = True
        # The exit handlers of the libraries, such as wandb's, must run later: the last registered runs first.
        atexit.register(self._close_all)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        if self._is_open:
            self._logger.log(metrics, step)

    def _end(self, finished: bool) -> None:
        self._ends = True
        if self._is_open:
            self._is_open = False
            self._logger.close(finished=finished)

    def _fail(self, failure: str) -> None:
        """Report the first failure; the logger gets later values all the same."""
        if not self._has_reported:
            self._has_reported = True
            self._report(f"{self.name} {failure}. The training is not affected.")
