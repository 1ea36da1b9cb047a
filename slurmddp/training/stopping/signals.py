"""Record stop signals in a rank, and let the rank's loader workers survive them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from types import FrameType
from typing import Any, Self

from slurmddp.errors import ConfigError
from slurmddp.host.process import die_with_parent
from slurmddp.host.signals import STOP_SIGNALS, SignalInbox

_RANK_POLL_S = 0.2
"""Seconds between two checks in a loader worker whether its rank is alive."""
_HELD = STOP_SIGNALS | {signal.SIGINT}
"""The signals that are blocked in loader workers."""


class StopSignals(SignalInbox):
    """Context manager in which stop signals only set attributes of this object.

    Enter it in the main thread. While the main thread is inside a collective, Python runs no signal handler;
    other threads then learn of a signal by `poll`.

    Args:
        signals: the signals that request a stop, by default SIGTERM and SIGUSR2.

    Attributes:
        received: the name of the first signal that arrived; None if none has arrived.
        terminated: whether SIGTERM or SIGINT has arrived, after which a SIGKILL may follow.
    """

    def __init__(self, signals: Collection[signal.Signals] = STOP_SIGNALS) -> None:
        super().__init__(signals)
        self.received: str | None = None
        self.terminated = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "Signal handlers can be installed in the main thread only, and this is another thread.",
                hint="Start the training from the main thread.",
            )
        return super().__enter__()

    def poll(self) -> str | None:
        """Record signals that arrived but whose handler has not run yet, and return `received`.

        Any thread may call it.
        """
        # The handler may record the same signals again later, which changes nothing.
        for number in self.read():
            self._note(number, None)

        return self.received

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
        if number in (signal.SIGTERM, signal.SIGINT):
            self.terminated = True


_started_in_main_thread = False
"""Whether the main thread has started the loader workers; a forked worker inherits the value."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Block stop signals while loader workers start, so that each worker starts with them blocked.

    Otherwise a signal could end a worker before `hold_in_worker` runs in it.
    """
    global _started_in_main_thread
    _started_in_main_thread = threading.current_thread() is threading.main_thread()

    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


def hold_in_worker(worker_id: int) -> None:
    """Make a loader worker ignore stop signals, and end it with its rank; a `worker_init_fn`.

    SLURM signals every process of a step, loader workers too, and Ctrl-C reaches them as well. A rank without
    its workers could not continue to its checkpoint. So a worker ignores SIGUSR2, SIGINT, and each SIGTERM
    that its rank did not send. A SIGTERM from its rank ends it: torch ends workers in this way.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    # A forked worker inherits the pipe into which the rank's handler writes; don't write into it.
    signal.set_wakeup_fd(-1)

    rank = multiprocessing.parent_process()
    rank_pid = os.getppid()
    if rank is not None and rank.pid is not None:
        rank_pid = rank.pid

    # Let the kernel kill the worker when its parent ends, even while the worker is inside C code. The kernel
    # watches the thread that forked the worker, so this is safe only if that was the main thread: another
    # thread may end before the rank does.
    if _started_in_main_thread and sys.platform == "linux" and os.getppid() == rank_pid:
        die_with_parent(signal.SIGKILL)

    threading.Thread(
        target=_end_with_rank, args=(rank, rank_pid), name="slurmddp-signals", daemon=True
    ).start()


def _end_with_rank(rank: Any, rank_pid: int) -> None:
    """End this worker once its rank sends SIGTERM or has ended; runs in a thread of the worker."""
    # The parent of a worker may be a fork server: then `getppid` does not show the end of the rank.
    is_child = os.getppid() == rank_pid

    while True:
        received = signal.sigtimedwait(STOP_SIGNALS, _RANK_POLL_S)
        if received is not None and received.si_signo == signal.SIGTERM and received.si_pid == rank_pid:
            os._exit(0)

        rank_has_ended = os.getppid() != rank_pid
        if not is_child:
            rank_has_ended = bool(connection.wait([rank.sentinel], 0))
        if rank_has_ended:
            os._exit(0)
