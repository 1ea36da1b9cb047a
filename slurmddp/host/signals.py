"""Signals as messages: they are collected and read between other events, never acted on in a handler.

The kernel's notice of a signal is written to a pipe (`signal.set_wakeup_fd`), so one `select` waits for
signals, for the end of children (SIGCHLD) and for output alike, without polling and without a race.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2})
"""What SLURM sends before it takes a job away; both mean: save and leave."""


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has already written the number to the wake-up pipe."""


class SignalInbox:
    """Context manager of the main thread: holds the given signals until `wait` returns them."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._signals:
            self._before[number] = signal.signal(number, _note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._close()

    def _close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """Return the descriptor that is readable while signals lie here, for a caller's own select."""
        return self._reader

    def read(self) -> list[signal.Signals]:
        """Return the signals that came since the last call, in order, without waiting."""
        with suppress(BlockingIOError):
            arrived = os.read(self._reader, 4096)
            return [signal.Signals(number) for number in arrived if number in self._signals]
        return []

    def wait(self, timeout_s: float) -> list[signal.Signals]:
        """Return as soon as a signal has come, or after `timeout_s` with none."""
        select.select([self._reader], [], [], timeout_s)
        return self.read()

    def forget_in_child(self) -> None:
        """Leave the parent's pipe alone; to be called in a forked child before signals are let in."""
        signal.set_wakeup_fd(-1)
        self._close()
