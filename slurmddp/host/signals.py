"""Signals as messages: a process collects signals and reads them between other events.

Python writes the number of each signal into a pipe (`signal.set_wakeup_fd`). So one `select` waits for
signals, for the end of children (SIGCHLD) and for output alike, without polling and without a race.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2})
"""What SLURM sends before it takes a job away; both mean: save and leave."""


class SignalInbox:
    """Context manager of the main thread: collects the given signals until `read` or `wait` returns them."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = frozenset(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._lock = threading.Lock()
        self._reader = self._writer = -1

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that C code has installed: Python can't install it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        signal.set_wakeup_fd(self._wakeup_before)
        self._close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: Python has already written the number to the wake-up pipe."""

    def _close(self) -> None:
        with self._lock:  # Another thread may be in `read`.
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are signals to read; for `select`."""
        return self._reader

    def read(self) -> list[signal.Signals]:
        """Return the signals since the last call, in their order, without waiting; empty after the end."""
        with self._lock, suppress(BlockingIOError):
            numbers = os.read(self._reader, 4096) if self._reader >= 0 else b""
            return [signal.Signals(number) for number in numbers if number in self._signals]
        return []

    def wait(self, timeout_s: float, others: Iterable[int] = ()) -> list[signal.Signals]:
        """Return the next signals as soon as one arrives.

        The result is empty after `timeout_s`, and when one of the descriptors in `others` is readable.
        """
        poll = select.poll()  # `select` itself takes no descriptor above 1023.
        for descriptor in (self._reader, *others):
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)
        return self.read()

    def close_in_child(self) -> None:
        """Let go of the parent's pipe; a forked child calls this before it unblocks signals."""
        signal.set_wakeup_fd(-1)
        self._close()
