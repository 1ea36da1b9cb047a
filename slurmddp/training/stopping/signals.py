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
from typing import TYPE_CHECKING, Any

from slurmddp.errors import ConfigError
from slurmddp.host.process import die_with_parent
from slurmddp.host.signals import STOP_SIGNALS, SignalInbox

if TYPE_CHECKING:
    from typing_extensions import Self

_RANK_POLL_S = 0.2
"""Seconds between two checks in a loader worker whether its rank is alive."""
_HELD = STOP_SIGNALS | {signal.SIGINT}
"""The signals that are blocked in loader workers."""


class StopSignals(SignalInbox):
    """Context manager: SIGTERM, SIGUSR2 and other given signals set a flag and do nothing else until it ends.

    Enter it in the main thread. While the main thread is inside a collective, Python runs no handler; other
    threads then learn of a signal by `poll`.

    Args:
        signals: the signals that mean stop.

    Attributes:
        received: the name of the first signal that arrived; None before.
        terminated: whether SIGTERM or SIGINT has arrived; a SIGKILL may follow them.
    """

    def __init__(self, signals: Collection[signal.Signals] = STOP_SIGNALS) -> None:
        super().__init__(signals)
        self.received: str | None = None
        self.terminated = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "Stop signals can be handled in the main thread only.", hint="Start the training from there."
            )
        return super().__enter__()

    def poll(self) -> str | None:
        """Record signals whose handler has not run yet; return `received`. Any thread may call it."""
        # The handler may run for the same signals later; a second note changes nothing.
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
    """Let a loader worker ignore SLURM's stop signals, and end with its rank; a `worker_init_fn`.

    SLURM signals every process of the step, and Ctrl-C every process of a rank. The worker ignores that
    SIGTERM, every SIGUSR2 and every SIGINT, so that the rank can continue to its checkpoint. A SIGTERM from
    its rank ends the worker, as torch intends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    # The inherited pipe belongs to the rank.
    signal.set_wakeup_fd(-1)

    rank = multiprocessing.parent_process()
    rank_pid = os.getppid()
    if rank is not None and rank.pid is not None:
        rank_pid = rank.pid

    # The kernel kills the worker, even inside C code, when the thread that forked it ends. The main thread
    # ends with the rank; another thread may end before.
    if _started_in_main_thread and sys.platform == "linux" and os.getppid() == rank_pid:
        die_with_parent(signal.SIGKILL)

    threading.Thread(
        target=_end_with_rank, args=(rank, rank_pid), name="slurmddp-signals", daemon=True
    ).start()


def _end_with_rank(rank: Any, rank_pid: int) -> None:
    """End this worker at its rank's SIGTERM, or when the rank has ended."""
    # If a fork server started the worker, the rank is not its parent.
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
