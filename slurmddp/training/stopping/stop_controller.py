"""Decide for one training whether to stop: by signals, the run's stop file, the time limit and the agreement.

Signal handlers are installed by the first call of `should_stop`, so that SIGTERM still ends a program that
never calls it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

from slurmddp.collectives import values as collectives
from slurmddp.environments.time_limits import TimeLimits, read_limits
from slurmddp.errors import SlurmddpError
from slurmddp.host.signals import STOP_SIGNALS
from slurmddp.runs.folder.history import TIME_LIMIT
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.process_group.setup import RankContext
from slurmddp.training.stopping.agreement import StopAgreement, StopReason, file_reason, signal_reason
from slurmddp.training.stopping.deadline import StepDurations, last_safe_moment, shortfalls
from slurmddp.training.stopping.exit_guard import ExitGuard
from slurmddp.training.stopping.signals import StopSignals

log = logging.getLogger(__name__)

_PAST_SAVES = 10
"""How many of the latest saves of earlier attempts count for the longest save."""


class StopController:
    """Decides whether a training stops; each rank asks its own object once per step, and all answers agree.

    Args:
        guard: a running guard, whose signals request a stop too, and which stays open after `close`. None:
            the first call of `should_stop` opens a guard.
        run: the run that this training belongs to.
    """

    is_leaving: ClassVar[bool] = False
    """Whether `should_stop` returned True and no backward pass followed; the exit code is then not 0."""

    def __init__(self, guard: ExitGuard | None, run: RunContext = RunContext()) -> None:  # noqa: B008 - frozen
        self._run = run
        self._guard = guard
        self._opened = ExitStack()
        """The guard and signals that this object has opened."""
        self._agreement: StopAgreement | None = None
        self._reason_at_start: StopReason | None = None
        """Why all ranks stop before their first step; None if they don't."""

        self._steps = 0
        """How many optimizer steps have started."""
        self._pace = StepDurations()
        self._answered_at: float | None = None
        """When `should_stop` last returned, in seconds of `time.monotonic`."""

        self._folder: RunFolder | None = None
        """The run folder, on rank 0 only: a single rank polls the stop file and warns."""
        self._warned: set[str] = set()
        self.is_writing: Callable[[], bool] = lambda: False
        """Returns whether an earlier checkpoint is still being written; a stop waits for it."""

    def should_stop(self, context: RankContext) -> bool:
        """Decide whether to stop now instead of starting the next optimizer step, alike on all ranks."""
        if self._agreement is None and self._reason_at_start is None:
            self._begin(context)

        stops = True
        if self._agreement is not None:
            self._steps += 1
            # Measure from the last return of `should_stop`: it may wait for other ranks, which is no part of
            # a step.
            if self._answered_at is not None:
                self._pace.add_step(time.monotonic() - self._answered_at)

            stops = self._agreement.should_stop()
            self._answered_at = time.monotonic()

        # Assign only if the value changes, because each assignment to a class attribute invalidates Python's
        # attribute caches for the class.
        if stops is not self.is_leaving:
            StopController.is_leaving = stops

        return stops

    def _begin(self, context: RankContext) -> None:
        """Install signal handlers, and start the agreement unless a stop was already requested."""
        if self._guard is None:
            self._guard = self._open_guard()
        signals = self._guard.signals
        info = context.info

        if info.rank == 0 and self._run.folder is not None:
            self._folder = self._run.folder
            self._read_saves(self._folder)

        # The agreement would let a first step run before its first poll. So gather earlier requests by a
        # collective; if there is one, no step runs.
        stop_file = self._folder.stop_file if self._folder else None
        self._reason_at_start = _first_reason(signal_reason(signals, info.rank) or file_reason(stop_file))
        if self._reason_at_start is None:
            self._agreement = StopAgreement(
                context.store,
                info.rank,
                info.world_size,
                signals=signals,
                stop_file=stop_file,
                launch_id=info.launch_id,
            )

        # All ranks have the same deadline, so only rank 0 checks it.
        self._guard.begin(self._check_deadline if info.rank == 0 else None)
        self._warn()

    def _open_guard(self) -> ExitGuard:
        stop_signals = set(STOP_SIGNALS)
        # An agent passes Ctrl-C on to its ranks as SIGINT, which then requests a stop. Without an agent,
        # SIGINT raises KeyboardInterrupt, as usual.
        if self._run.by_agent:
            stop_signals.add(signal.SIGINT)

        signals = self._opened.enter_context(StopSignals(stop_signals))
        return self._opened.enter_context(ExitGuard(signals, read_limits(os.environ)))

    def _read_saves(self, folder: RunFolder) -> None:
        """Count the durations of the last saves of earlier attempts as measured saves."""
        try:
            saves = [event for event in folder.events() if event.get("event") == "saved"]
        except SlurmddpError:
            # Durations are optional here; code that needs the events raises the error of a damaged file.
            return

        for event in saves[-_PAST_SAVES:]:
            paused_s = event.get("seconds")
            written_s = event.get("written_s", 0.0)
            if isinstance(paused_s, (int, float)) and isinstance(written_s, (int, float)):
                self._pace.add_save(paused_s + written_s)

    def _check_deadline(self, now: float) -> None:
        """Request a stop once `last_safe_moment` has passed; the exit guard calls it at each of its polls.

        Args:
            now: seconds since the epoch.
        """
        measured = replace(self._pace.measured, is_writing=self.is_writing())
        # Keep a reference: `close` in the main thread may set the attribute to None while this thread runs.
        agreement = self._agreement
        moment = last_safe_moment(self._limits, measured)
        if agreement is None or moment is None or now < moment:
            return

        # Let each attempt take at least one step: otherwise the job would be requeued without progress.
        if self._steps > 1:
            agreement.request(TIME_LIMIT)

    @property
    def is_answering(self) -> bool:
        """Whether the program has called `should_stop`, and the agreement is not closed yet."""
        return self._agreement is not None

    @property
    def _limits(self) -> TimeLimits:
        return self._guard.limits if self._guard is not None else TimeLimits()

    def saved(self, seconds: float) -> None:
        """Record that a save took `seconds` until it was durable; later deadlines leave as much time."""
        self._pace.add_save(seconds)
        self._warn()

    def exclude_pause(self) -> None:
        """Don't measure the step since the last `should_stop`, because training paused for a save."""
        self._answered_at = None

    def _warn(self) -> None:
        """Log and record a warning for each limit that is too short for the measured save, once per limit."""
        if self._folder is None:
            return

        for name, text in shortfalls(self._limits, self._pace.measured).items():
            if name not in self._warned:
                self._warned.add(name)
                log.warning(text)
                self._run.add_event("warned", about=name, text=text)

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a request to stop, even before the first call of `should_stop`."""
        if self.reason is not None:
            return True
        return self._guard is not None and self._guard.signals.received is not None

    @property
    def reason(self) -> StopReason | None:
        """The reason of the stop; None if no stop was requested."""
        reason = self._agreement.reason if self._agreement else self._reason_at_start
        if reason is None or self._folder is None or reason.source != "SIGUSR2":
            return reason

        # After `slurmddp stop`, the agent sends SIGUSR2 to the ranks. The stop file is then the real reason.
        return file_reason(self._folder.stop_file) or reason

    def close(self) -> None:
        """Close the agreement, and the guard and signal handlers that this object has opened."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

        self._opened.close()


def _first_reason(reason: StopReason | None) -> StopReason | None:
    """Return the reason of the lowest rank that has one, on all ranks; None if no rank has one.

    Args:
        reason: the reason of this rank, or None.
    """
    texts = collectives.gather(reason.as_json() if reason else None)
    for text in texts:
        if text is not None:
            return StopReason.from_json(text)

    return None
