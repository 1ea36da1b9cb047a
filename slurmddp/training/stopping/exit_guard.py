"""A thread that ends the rank with 75 where the training itself can't: before it began, and before the kill.

The main thread may sit in a collective, in a wait for data or for missing ranks, or in a step or save that
takes longer than the grace. Both exits leave the run folder as a kill would. The exit code requeues the job.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar

from slurmddp.environments.time_limits import Limits, leave_at
from slurmddp.errors import EXIT_STOPPED
from slurmddp.host.streams import tell
from slurmddp.training.stopping.signals import StopSignals

log = logging.getLogger(__name__)

POLL_S = 0.1
PATIENCE_S = 1.0
"""How long a rank that is told to stop before it trains may take to leave in good order."""


class ExitGuard:
    """Context manager: watches `signals` from another thread until it ends.

    Until `begin` a stop signal ends the process after a second, since nothing was trained that could be
    saved. From then on a rank that got SIGTERM leaves by itself shortly before SLURM, by `limits`, kills it.
    """

    standing: ClassVar[ExitGuard | None] = None
    """The guard of this process, if it has one."""

    def __init__(
        self,
        signals: StopSignals,
        limits: Limits,
        *,
        now: Callable[[], float] = time.time,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        self.signals, self.limits = signals, limits
        self._now, self._leave = now, leave or _leave
        self._begun = False
        self._noticed: float | None = None
        self._terminated: float | None = None
        self._each_look: Callable[[float], None] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slurmddp-guard", daemon=True)

    def __enter__(self) -> ExitGuard:
        self._thread.start()
        ExitGuard.standing = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the watch; the rank leaves in its own way from here on."""
        self._closing.set()
        if ExitGuard.standing is self:
            ExitGuard.standing = None
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def begun(self) -> bool:
        return self._begun

    def begin(self, each_look: Callable[[float], None] | None = None) -> None:
        """Say that the training minds stops itself now; `each_look` gets the time several times a second."""
        self._begun, self._each_look = True, each_look

    def look(self) -> None:
        """Do what the moment asks for."""
        now = self._now()
        if self.signals.look() is not None and self._noticed is None:
            self._noticed = now
        if self.signals.terminated and self._terminated is None:
            self._terminated = now
        if why := self._reason_to_leave(now):
            self._leave(why)
        elif self._each_look is not None:
            self._each_look(now)

    def _reason_to_leave(self, now: float) -> str | None:
        if not self._begun:
            if self._noticed is None or now < self._noticed + PATIENCE_S:
                return None
            return f"{self.signals.received} came before the training began: there is nothing to save."
        at = leave_at(self.limits, self._terminated)
        if self._terminated is None or at is None or now < at:
            return None
        return (
            f"{now - self._terminated:.0f} s after SIGTERM this rank has not left, and SLURM is about to "
            "kill it: it leaves now. The run resumes from its newest state in memory or on disk."
        )

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            self.look()


def _leave(why: str) -> None:
    """Say why and end the process, whatever its other threads do."""
    tell(why)
    os._exit(EXIT_STOPPED)
