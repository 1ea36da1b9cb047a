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
    """Return the loggers of several `loggers` settings; a built-in logger that is named twice is built once.

    Args:
        values: `loggers` settings (see `settings.loggers.targets`), which may also contain Logger objects.

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
    """Return the loggers of one `loggers` setting: objects for its names and mappings, then its objects."""
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
    """Return `logger` unchanged.

    Raises:
        ConfigError: it is a class, or lacks a method of a logger.
    """
    if isinstance(logger, type):
        raise ConfigError(
            f"The logger {logger!r:.80} is a class, not an object.", hint="Give an object of the class."
        )

    missing = [name for name in _METHODS if not callable(getattr(logger, name, None))]
    if missing:
        raise ConfigError(
            f"The logger {logger!r:.80} has no method {missing[0]!r}.",
            hint="Derive its class from slurmddp.training.loggers.Logger, whose methods are empty.",
        )

    return logger  # type: ignore[no-any-return]


class Loggers:
    """The loggers of this process, each in a thread of its own; the threads start with the first metrics.

    Args:
        loggers: loggers that are not started yet.
        run: passed to `Logger.start` with the right `first_step`; None: loggers are never started.
        is_stopped: returns whether the training was stopped before its last step; `close` calls it.
        warn: called with a text about a logger that fails.
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
        """The step of the loaded state; None if no state was loaded."""
        self._has_started = False
        self._is_closed = False
        self._pid = os.getpid()

    def resumed(self, step: int | None) -> None:
        """Start the loggers again at the next metrics: a state of `step` was loaded (None: no state)."""
        self._resumed = step
        self._has_started = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass metrics after `step` to the threads of all loggers, without waiting for the loggers."""
        # The threads of the loggers don't exist in a forked child.
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
        """Return `run` with the right `first_step` for loggers that start with the metrics of `step`."""
        if self._resumed is None:
            return replace(run, first_step=step)

        # The training repeats the steps after the loaded state, so their old values are replaced. An earlier
        # start has logged the values of the state's own step, which stay.
        first_step = step
        if step >= self._resumed:
            first_step = self._resumed + 1
        return replace(run, first_step=first_step, is_continued=True)

    def close(self) -> None:
        """Close all loggers, and wait until they have ended, at most `CLOSE_S` seconds together.

        Later calls do nothing.
        """
        if self._is_closed or os.getpid() != self._pid:
            return

        self._is_closed = True
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.close(finished=not self._is_stopped())
        # All threads were asked to end before the first wait, so they share one deadline.
        for thread in self._threads:
            thread.wait(deadline)

    def _report(self, text: str) -> None:
        try:
            self._warn(text)
        except Exception:
            # The run folder can't take the warning: the disk is full, or a later attempt owns the folder.
            log.warning(text)


class _LoggerThread:
    """A logger, the queue of calls to its methods, and the thread that makes these calls in order.

    Args:
        logger: the logger.
        report: called with a text about the first failure.
        close_all: closes all loggers of the training; registered to be called when the process exits.
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
        # If the logger hangs and its queue is full, drop the oldest call to make room for the last one.
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
        # The loggers must be closed before the exit handlers of their libraries, such as wandb's, run. Exit
        # handlers run in reverse order of registration, so register after `start` has imported the library.
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
        """Report the first failure of this logger, which still gets later values."""
        if not self._has_reported:
            self._has_reported = True
            self._report(f"{self.name} {failure}. The training is not affected.")
