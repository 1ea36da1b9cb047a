"""Signals that mean stop: noted by the rank, and kept away from its loader workers."""

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

_RANK_LOOK_S = 0.2


class StopSignals(SignalInbox):
    """Context manager: SIGTERM and SIGUSR2 set a flag, and do nothing else, until it ends.

    While the main thread is inside a collective, Python runs no handler. Other threads call `look` then.

    Attributes:
        received: the name of the first signal that arrived; None before.
        terminated: whether SIGTERM was among the signals.
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

    def look(self) -> str | None:
        """Return `received`, including signals that arrived while the main thread could run no handler."""
        for number in self.read():
            self._note(number, None)
        return self.received

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
        self.terminated |= number == signal.SIGTERM


_started_in_main_thread = False


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold stop signals back while loader workers are being started, which inherit that; then let them in.

    It closes the moment between a worker's birth and its `hold_in_worker`.
    """
    global _started_in_main_thread  # a forked worker finds it as it is now
    _started_in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hold_in_worker(worker_id: int) -> None:
    """Make a loader worker survive the job's stop signals, but not its rank; a DataLoader's `worker_init_fn`.

    A SIGTERM from its own rank ends it, as torch intends; one from SLURM, which signals every process of
    the step, is left out, so that the rank can go on to its checkpoint. SIGUSR2 is left out always.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.set_wakeup_fd(-1)  # the rank's own pipe, inherited: nothing of this process belongs there
    rank = multiprocessing.parent_process()
    pid = rank.pid if rank is not None and rank.pid is not None else os.getppid()
    if _started_in_main_thread and sys.platform == "linux" and os.getppid() == pid:
        # At once, even from within C code. The kernel sends it at the death of the thread that forked, which
        # for the main thread is the rank's.
        die_with_parent(signal.SIGKILL)
    threading.Thread(target=_obey, args=(rank, pid), name="slurmddp-signals", daemon=True).start()


def _obey(rank: Any, pid: int) -> None:
    """End this worker at its rank's SIGTERM, or when the rank is gone."""
    is_child = os.getppid() == pid  # else a fork server stands between them
    while True:
        received = signal.sigtimedwait(STOP_SIGNALS, _RANK_LOOK_S)
        if received is not None and received.si_signo == signal.SIGTERM and received.si_pid == pid:
            os._exit(0)
        if os.getppid() != pid if is_child else connection.wait([rank.sentinel], 0):
            os._exit(0)
