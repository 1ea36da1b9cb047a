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
from slurmddp.environments.time_limits import Limits, read_limits
from slurmddp.errors import SlurmddpError
from slurmddp.host.signals import STOP_SIGNALS
from slurmddp.runs.folder.history import TIME_LIMIT
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.process_group.setup import RankContext
from slurmddp.training.stopping.agreement import StopAgreement, StopReason, file_reason, signal_reason
from slurmddp.training.stopping.deadline import Pace, last_safe_moment, shortfalls
from slurmddp.training.stopping.exit_guard import ExitGuard
from slurmddp.training.stopping.signals import StopSignals

log = logging.getLogger(__name__)

_PAST_SAVES = 10
"""How many of the latest saves of earlier attempts count for the longest save."""


class StopController:
    """Answers `should_stop` once per step.

    A given `guard` is used together with its signals, and stays open after `close`.
    """

    is_leaving: ClassVar[bool] = False
    """Whether `should_stop` returned True and no backward pass followed; the exit code is then not 0.

    It is assigned only when it changes: an assignment to a class empties Python's attribute caches.
    """

    def __init__(self, guard: ExitGuard | None, run: RunContext = RunContext()) -> None:  # noqa: B008 - frozen
        self._run = run
        self._guard = guard
        self._own = ExitStack()
        """The guard and signals that this object has opened."""
        self._agreement: StopAgreement | None = None
        self._found_at_start: StopReason | None = None
        """Why all ranks stop before their first step."""
        self._steps = 0
        """How many optimizer steps have started."""
        self._pace = Pace()
        self._answered_at: float | None = None
        self._folder: RunFolder | None = None
        """The run folder, on rank 0 only: a single rank polls the stop file and warns."""
        self._warned: set[str] = set()
        self.is_writing: Callable[[], bool] = lambda: False
        """Returns whether an earlier checkpoint is still being written; a stop waits for it."""

    def should_stop(self, context: RankContext) -> bool:
        """Return whether to stop now instead of starting the next optimizer step."""
        if self._agreement is None and self._found_at_start is None:
            self._begin(context)
        stops = True
        if self._agreement is not None:
            self._steps += 1
            if self._answered_at is not None:
                self._pace.add_step(time.monotonic() - self._answered_at)
            stops = self._agreement.should_stop()
            self._answered_at = time.monotonic()
        if stops is not self.is_leaving:
            StopController.is_leaving = stops
        return stops

    def _begin(self, context: RankContext) -> None:
        if self._guard is None:
            # An agent passes Ctrl-C on to a script as SIGINT. Elsewhere it stays a KeyboardInterrupt.
            wanted = STOP_SIGNALS | {signal.SIGINT} if self._run.by_agent else STOP_SIGNALS
            signals = self._own.enter_context(StopSignals(wanted))
            self._guard = self._own.enter_context(ExitGuard(signals, read_limits(os.environ)))
        info = context.info
        if info.rank == 0 and self._run.folder is not None:
            self._folder = self._run.folder
            self._read_saves(self._folder)
        file = self._folder.stop_file if self._folder else None
        signals = self._guard.signals
        # An agreement takes a moment. Gather requests from before the start, so that not even one step runs.
        reason = signal_reason(signals, info.rank) or file_reason(file)
        reasons = collectives.gather(reason.as_json() if reason else None)
        first = next((text for text in reasons if text), None)
        self._found_at_start = StopReason.from_json(first) if first else None
        if self._found_at_start is None:
            self._agreement = StopAgreement(
                context.store,
                info.rank,
                info.world_size,
                signals=signals,
                stop_file=file,
                launch_id=info.launch_id,
            )
        self._guard.begin(self._check_deadline if info.rank == 0 else None)
        self._warn()

    def _read_saves(self, folder: RunFolder) -> None:
        """Learn from earlier attempts how long a save takes."""
        try:
            saves = [event for event in folder.events() if event.get("event") == "saved"]
        except SlurmddpError:
            return  # Code that needs the events reports a damaged file.
        for event in saves[-_PAST_SAVES:]:
            paused_s, written_s = event.get("seconds"), event.get("written_s", 0.0)
            if isinstance(paused_s, (int, float)) and isinstance(written_s, (int, float)):
                self._pace.add_save(paused_s + written_s)

    def _check_deadline(self, now: float) -> None:
        """Request a stop at the last moment at which a save still fits; the exit guard calls it."""
        measured = replace(self._pace.measured, is_writing=self.is_writing())
        agreement, moment = self._agreement, last_safe_moment(self._limits, measured)
        # An attempt that takes no step would be requeued forever.
        if agreement is not None and moment is not None and now >= moment and self._steps > 1:
            agreement.request(TIME_LIMIT)

    @property
    def is_answering(self) -> bool:
        """Whether the program has asked `should_stop`, so that its own end is no answer to a stop signal."""
        return self._agreement is not None

    @property
    def _limits(self) -> Limits:
        return self._guard.limits if self._guard is not None else Limits()

    def saved(self, seconds: float) -> None:
        """Record that a save took `seconds` until it was durable, so that the deadline allows for it."""
        self._pace.add_save(seconds)
        self._warn()

    def exclude_pause(self) -> None:
        """Don't count the time since the last step, in which the training paused for a save, as a step."""
        self._answered_at = None

    def _warn(self) -> None:
        """Warn once of each limit that is too short for a save of the measured length."""
        if self._folder is None:
            return
        for name, text in shortfalls(self._limits, self._pace.measured).items():
            if name not in self._warned:
                self._warned.add(name)
                log.warning(text)
                self._run.add_event("warned", about=name, text=text)

    @property
    def requested(self) -> bool:
        signals = self._guard.signals if self._guard is not None else None
        return self.reason is not None or (signals is not None and signals.received is not None)

    @property
    def reason(self) -> StopReason | None:
        found = self._agreement.reason if self._agreement else self._found_at_start
        if found is None or self._folder is None or found.source != "SIGUSR2":
            return found
        # After `slurmddp stop`, the agent sends SIGUSR2 to the ranks of a script.
        return file_reason(self._folder.stop_file) or found

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        self._own.close()
