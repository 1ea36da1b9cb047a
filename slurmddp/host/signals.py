"""Collect the signals of this process, so that its event loop reads them like messages.

Python writes the number of each signal into a pipe (`signal.set_wakeup_fd`). A single `select` can then wait
for signals, for the end of children (SIGCHLD) and for output, without polling and without a race.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2})
"""The signals that SLURM sends before it ends a job; both ask the ranks to save and end."""


class SignalInbox:
    """A context manager that catches signals and keeps them until `read` or `wait` returns them.

    Only the main thread may enter it.
    """

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
            # None means that C code installed the old handler. Python can't restore it, so the default is
            # used.
            if handler is None:
                handler = signal.SIG_DFL
            signal.signal(number, handler)
        self._before.clear()

        signal.set_wakeup_fd(self._wakeup_before)
        self._close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: Python has already written the number to the wake-up pipe."""

    def _close(self) -> None:
        # The lock prevents closing the pipe while another thread is in `read`.
        with self._lock:
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1

    def fileno(self) -> int:
        """Return a descriptor for `select` or `poll`, which is readable while there are signals to read."""
        return self._reader

    def read(self) -> list[signal.Signals]:
        """Return the signals since the last call in their order, without waiting; empty if there are none."""
        with self._lock:
            if self._reader < 0:
                return []
            try:
                numbers = os.read(self._reader, 4096)
            except BlockingIOError:
                return []
        # Other signals are left out: Python writes every signal that has a handler into the pipe.
        return [signal.Signals(number) for number in numbers if number in self._signals]

    def wait(self, timeout_s: float, others: Iterable[int] = ()) -> list[signal.Signals]:
        """Wait for a signal, and return the signals since the last call.

        The wait also ends after `timeout_s`, or when a descriptor in `others` is readable. The result may
        then be empty.
        """
        # poll, because `select.select` accepts no descriptor above 1023.
        poll = select.poll()
        for descriptor in (self._reader, *others):
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)
        return self.read()

    def close_in_child(self) -> None:
        """Close the pipe of the parent; a forked child must call this before it unblocks signals."""
        # Otherwise the child would write its signals into the pipe of the parent.
        signal.set_wakeup_fd(-1)
        self._close()
