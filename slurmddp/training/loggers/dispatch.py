"""Hand metrics to all loggers, each in a thread of its own, so that none can delay or end the training."""

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

_NAMED = {one.target for one in NAMED.values()}
_METHODS = ("start", "log", "flush", "close")
_WAITING = 10_000
"""Calls that may wait for one logger; further values are dropped."""


def build(*values: Any) -> list[Logger]:
    """Return the loggers that several values of `loggers` name, each built-in one once.

    Args:
        values: each as for `config.loggers.targets`, and objects may stand among the names.

    Raises:
        ConfigError: a logger is unknown, its library is missing, or it lacks a method.
    """
    built: dict[str, Logger] = {}
    for value in values:
        given = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        objects = [one for one in given if not isinstance(one, (str, Mapping))]
        named = [one for one in given if isinstance(one, (str, Mapping))] if objects else value
        made = [instantiate(target, _key_=key) for key, target in targets(named).items()]
        for one in [*made, *objects]:
            path = f"{type(one).__module__}.{type(one).__qualname__}"
            built.setdefault(path if path in _NAMED else str(id(one)), _checked(one))
    return list(built.values())


def _checked(logger: Any) -> Logger:
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
        loggers: none of them is started yet.
        run: its `first_step` is set at each start.
        is_stopped: whether the training ends before its last step; asked at the end.
        warn: reports one line about a logger that fails.
    """

    def __init__(
        self,
        loggers: Sequence[Logger] = (),
        run: LoggedRun | None = None,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
        warn: Callable[[str], object] = log.warning,
    ) -> None:
        self._run, self._is_stopped, self._warn = run, is_stopped, warn
        self._threads = [_LoggerThread(one, self._tell, self.close) for one in loggers]
        self._resumed: int | None = None
        self._has_started = self._is_closed = False
        self._pid = os.getpid()

    def resumed(self, step: int | None) -> None:
        """Take the step of a loaded state, None without one; the next metrics start the loggers again."""
        self._resumed, self._has_started = step, False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the values after `step` to all loggers, without waiting for them."""
        if not self._threads or self._is_closed or os.getpid() != self._pid:
            return
        if not self._has_started and self._run is not None:
            self._has_started = True
            # Values after the loaded state come again; values of its own step may be of the start before.
            resumed = self._resumed
            first = resumed + 1 if resumed is not None and step >= resumed else step
            run = replace(
                self._run, first_step=first, is_continued=self._run.is_continued or resumed is not None
            )
            for one in self._threads:
                one.start(run)
        for one in self._threads:
            one.log(dict(metrics), step)

    def close(self) -> None:
        """End all loggers; returns after `CLOSE_S` at the latest. Later calls do nothing."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        until = time.monotonic() + CLOSE_S
        for one in self._threads:
            one.close(finished=not self._is_stopped())
        for one in self._threads:
            one.wait(until)

    def _tell(self, text: str) -> None:
        try:
            self._warn(text)
        except Exception:  # A full disk, or a later attempt of the run.
            log.warning(text)


class _LoggerThread:
    """One logger and the calls that wait for it."""

    def __init__(
        self, logger: Logger, tell: Callable[[str], object], close_all: Callable[[], object]
    ) -> None:
        self.name = f"The logger {type(logger).__name__}"
        self._logger, self._tell, self._close_all = logger, tell, close_all
        self._calls: queue.Queue[Callable[[], object]] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._is_open = self._has_told = self._ends = False

    def start(self, run: LoggedRun) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"slurmddp-{self.name}", daemon=True)
            self._thread.start()
        self._put(lambda: self._open(run))

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._put(lambda: self._logger.log(metrics, step) if self._is_open else None)

    def close(self, *, finished: bool) -> None:
        if self._calls.full():
            with suppress(queue.Empty):
                self._calls.get_nowait()
        self._put(lambda: self._end(finished))

    def wait(self, until: float) -> None:
        """Wait until the thread has ended, but not longer than `until` on the monotonic clock."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
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
                words = " ".join(str(error).split())[:300]
                self._fail(f"failed: {type(error).__name__}: {words}".rstrip(": "))

    def _open(self, run: LoggedRun) -> None:
        if self._is_open:
            self._logger.close(finished=False)
        self._is_open = False
        self._logger.start(run)
        self._is_open = True
        # The libraries' own exit handlers, such as wandb's, must run later: the last registered runs first.
        atexit.register(self._close_all)

    def _end(self, finished: bool) -> None:
        self._ends = True
        if self._is_open:
            self._is_open = False
            self._logger.close(finished=finished)

    def _fail(self, what: str) -> None:
        """Report the first failure; the next values are tried all the same."""
        if not self._has_told:
            self._has_told = True
            self._tell(f"{self.name} {what}. The training is not affected.")
