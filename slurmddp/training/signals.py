"""Signals that mean stop: noted by the rank, and kept away from its loader workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from slurmddp.errors import ConfigError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopSignals:
    """Context manager: SIGTERM and SIGUSR2 set a flag, and do nothing else, until it ends.

    `received` is the name of the first signal that came, or None; `terminated` says whether SIGTERM was among
    them. Enter it in the main thread. While that thread is inside a collective Python runs no handler; other
    threads learn of a signal by `look`.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = STOP_SIGNALS) -> None:
        self.received: str | None = None
        self.terminated = False
        self._signals = signals
        self._previous: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._previous_fd = -1
        self._lock = threading.Lock()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "Stop signals can be handled in the main thread only.", hint="Start the training from there."
            )
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python; it can't be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
        signal.set_wakeup_fd(self._previous_fd)
        with self._lock:  # not under the hands of a thread that looks
            pipe, self._pipe = self._pipe, None
            for descriptor in pipe or ():
                os.close(descriptor)

    def look(self) -> str | None:
        """Return `received`, noting first what came while the main thread could not; for other threads."""
        for number in self._pending():
            if number in self._signals:
                self._note(number, None)
        return self.received

    def _pending(self) -> bytes:
        with self._lock:
            try:
                return os.read(self._pipe[0], 4096) if self._pipe else b""
            except BlockingIOError:
                return b""

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
        self.terminated |= number == signal.SIGTERM


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold stop signals back while loader workers are being started, which inherit that; then let them in.

    It closes the moment between a worker's birth and its `hold_in_worker`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hold_in_worker(worker_id: int) -> None:
    """Make a loader worker survive the job's stop signals; the `worker_init_fn` of every DataLoader.

    A SIGTERM from its own rank ends it, as torch intends; one from SLURM, which signals every process of
    the step, is left out, so that the rank can go on to its checkpoint. SIGUSR2 is left out always.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.set_wakeup_fd(-1)  # the rank's own pipe, inherited: nothing of this process belongs there
    threading.Thread(target=_obey_parent, args=(os.getppid(),), name="slurmddp-signals", daemon=True).start()


def _obey_parent(parent: int) -> None:
    while True:
        received = signal.sigwaitinfo(STOP_SIGNALS)
        if received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)
