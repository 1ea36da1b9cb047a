"""End a rank with exit code 75 if its main thread can't leave in time before SLURM's SIGKILL.

The main thread may wait in a collective, for data or for missing ranks, or a step or save may take longer
than the grace. After this exit the run folder is in the same state as after a kill. The exit code 75 requeues
the job.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from slurmddp.environments.time_limits import TimeLimits, leave_at
from slurmddp.errors import EXIT_STOPPED
from slurmddp.host.streams import print_to_log
from slurmddp.training.stopping.signals import StopSignals

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two checks of signals and deadlines."""
PATIENCE_S = 1.0
"""Seconds that a rank has for an orderly exit after a stop signal that came before the training."""


class ExitGuard:
    """Context manager: a thread that ends the process if the rank does not exit after a stop signal.

    Until `begin` is called, the process ends `PATIENCE_S` seconds after a stop signal, because there is
    nothing to save. After `begin`, it ends after SIGTERM, shortly before the SIGKILL that `limits` predict.

    Args:
        signals: the stop signals of this rank, a context that was entered.
        limits: the end time of the job, and the times that SLURM leaves between SIGTERM and SIGKILL.
        now: returns the time in seconds since the epoch.
        leave: ends the process, given the reason as a sentence; by default with exit code 75.
    """

    standing: ClassVar[ExitGuard | None] = None
    """The running guard of this process, or None."""

    def __init__(
        self,
        signals: StopSignals,
        limits: TimeLimits,
        *,
        now: Callable[[], float] = time.time,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        self.signals = signals
        self.limits = limits
        self._now = now
        self._leave = leave or _leave
        self.begun = False
        """Whether `begin` was called, after which the training reacts to stop signals."""
        self._noticed: float | None = None
        """When the first stop signal was seen, in seconds of the clock."""
        self._terminated: float | None = None
        """When the first SIGTERM or SIGINT was seen, in seconds of the clock."""
        self._on_poll: Callable[[float], None] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slurmddp-guard", daemon=True)

    def __enter__(self) -> ExitGuard:
        self._thread.start()
        ExitGuard.standing = self
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; from now on the guard no longer ends the process."""
        self._closing.set()
        if ExitGuard.standing is self:
            ExitGuard.standing = None

        # `close` may be called by the guard's own thread, which can't join itself.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def begin(self, on_poll: Callable[[float], None] | None = None) -> None:
        """Leave the reaction to stop signals to the training, and call `on_poll` at each poll from now on.

        Args:
            on_poll: called in the guard's thread with the time in seconds since the epoch.
        """
        self.begun = True
        self._on_poll = on_poll

    def poll(self) -> None:
        """Check signals and deadlines once: end the process if it must end now, else call `on_poll`."""
        now = self._now()
        if self.signals.poll() is not None and self._noticed is None:
            self._noticed = now

        # SLURM counts the seconds until SIGKILL from SIGTERM; an earlier SIGUSR2 does not start this clock.
        if self.signals.terminated and self._terminated is None:
            self._terminated = now

        reason = self._reason_to_leave(now)
        if reason is not None:
            self._leave(reason)
        elif self._on_poll is not None:
            self._on_poll(now)

    def _reason_to_leave(self, now: float) -> str | None:
        """Return why the process has to end now, as a sentence; None if it need not end."""
        if not self.begun:
            if self._noticed is None or now < self._noticed + PATIENCE_S:
                return None

            return f"{self.signals.received} came before the training began: there is nothing to save."

        deadline = leave_at(self.limits, self._terminated)
        if self._terminated is None or deadline is None or now < deadline:
            return None

        return (
            f"{now - self._terminated:.0f} s after SIGTERM this rank has not left, and SLURM is about to "
            "kill it: it exits now. The run resumes from its newest state in memory or on disk."
        )

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            self.poll()


def _leave(reason: str) -> None:
    """Print the reason and end the process, whatever its other threads do."""
    print_to_log(reason)
    # `sys.exit` would end only the guard's thread, and the main thread may be stuck in a collective.
    os._exit(EXIT_STOPPED)
