"""Decide for one training whether to stop: by signals, the run's stop file, the time limit and the agreement.

Nothing is installed before the first question, so that SIGTERM still ends a program that never asks.
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
    """Decide once per step whether the training stops.

    Args:
        guard: a running guard, whose signals are used too and which stays open after `close`; None opens a
            guard at the first question.
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
        """Why all ranks stop before their first step."""

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
            # The wait for the other ranks inside `should_stop` belongs to no step.
            if self._answered_at is not None:
                self._pace.add_step(time.monotonic() - self._answered_at)

            stops = self._agreement.should_stop()
            self._answered_at = time.monotonic()

        # Assign only a change: an assignment to a class empties Python's attribute caches.
        if stops is not self.is_leaving:
            StopController.is_leaving = stops

        return stops

    def _begin(self, context: RankContext) -> None:
        """Handle stops from now on, and gather the requests that came before the first step."""
        if self._guard is None:
            self._guard = self._open_guard()
        signals = self._guard.signals
        info = context.info

        if info.rank == 0 and self._run.folder is not None:
            self._folder = self._run.folder
            self._read_saves(self._folder)

        # An agreement takes a moment. Gather requests from before the start, so that not even one step runs.
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

        # All ranks of a job have the same deadline, so that it is enough if one rank checks it.
        self._guard.begin(self._check_deadline if info.rank == 0 else None)
        self._warn()

    def _open_guard(self) -> ExitGuard:
        stop_signals = set(STOP_SIGNALS)
        # An agent passes Ctrl-C on to a script as SIGINT. Elsewhere it stays a KeyboardInterrupt.
        if self._run.by_agent:
            stop_signals.add(signal.SIGINT)

        signals = self._opened.enter_context(StopSignals(stop_signals))
        return self._opened.enter_context(ExitGuard(signals, read_limits(os.environ)))

    def _read_saves(self, folder: RunFolder) -> None:
        """Learn from earlier attempts how long a save takes."""
        try:
            saves = [event for event in folder.events() if event.get("event") == "saved"]
        except SlurmddpError:
            # Code that needs the events reports a damaged file.
            return

        for event in saves[-_PAST_SAVES:]:
            paused_s = event.get("seconds")
            written_s = event.get("written_s", 0.0)
            if isinstance(paused_s, (int, float)) and isinstance(written_s, (int, float)):
                self._pace.add_save(paused_s + written_s)

    def _check_deadline(self, now: float) -> None:
        """Request a stop at the last moment at which a save still fits; the exit guard calls it."""
        measured = replace(self._pace.measured, is_writing=self.is_writing())
        # Read the attribute once: the main thread may close the agreement meanwhile.
        agreement = self._agreement
        moment = last_safe_moment(self._limits, measured)
        if agreement is None or moment is None or now < moment:
            return

        # An attempt that takes no step would be requeued forever.
        if self._steps > 1:
            agreement.request(TIME_LIMIT)

    @property
    def is_answering(self) -> bool:
        """Whether the program has asked `should_stop`, so that its own end is no answer to a stop signal."""
        return self._agreement is not None

    @property
    def _limits(self) -> TimeLimits:
        return self._guard.limits if self._guard is not None else TimeLimits()

    def saved(self, seconds: float) -> None:
        """Record that a save took `seconds` until it was durable, so that the deadline allows for it."""
        self._pace.add_save(seconds)
        self._warn()

    def exclude_pause(self) -> None:
        """Don't count the time since the last step, in which the training paused for a save, as a step."""
        self._answered_at = None

    def _warn(self) -> None:
        """Warn once of each limit that is too short for a save of the measured duration."""
        if self._folder is None:
            return

        for name, text in shortfalls(self._limits, self._pace.measured).items():
            if name not in self._warned:
                self._warned.add(name)
                log.warning(text)
                self._run.add_event("warned", about=name, text=text)

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a request to stop, even before the first question."""
        if self.reason is not None:
            return True
        return self._guard is not None and self._guard.signals.received is not None

    @property
    def reason(self) -> StopReason | None:
        """Why the ranks stop; None without a request."""
        reason = self._agreement.reason if self._agreement else self._reason_at_start
        if reason is None or self._folder is None or reason.source != "SIGUSR2":
            return reason

        # After `slurmddp stop`, the agent sends SIGUSR2 to the ranks of a script.
        return file_reason(self._folder.stop_file) or reason

    def close(self) -> None:
        """End the agreement, and the guard and signals that this object has opened."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

        self._opened.close()


def _first_reason(reason: StopReason | None) -> StopReason | None:
    """Gather the reasons of all ranks; return the reason of the lowest rank that has one, or None."""
    texts = collectives.gather(reason.as_json() if reason else None)
    for text in texts:
        if text is not None:
            return StopReason.from_json(text)

    return None
