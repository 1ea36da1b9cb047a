"""Whether to stop, for one training: signals, the run's stop file, the time limit, the ranks' agreement.

A program that never asks whether to stop has to end on SIGTERM as usual, so nothing happens before it asks.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from slurmddp.environments.time_limits import Limits, read_limits
from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.process_group import collectives
from slurmddp.training.process_group.setup import RankContext
from slurmddp.training.stopping.agreement import StopAgreement, file_reason, signal_reason
from slurmddp.training.stopping.deadline import Pace, last_safe_moment, shortfalls
from slurmddp.training.stopping.exit_guard import ExitGuard
from slurmddp.training.stopping.signals import StopSignals

log = logging.getLogger(__name__)

_PAST_SAVES = 10
"""How many saves of earlier attempts are looked at for the longest."""


class StopController:
    """Asks once per step; `guard` is one that stands already, with its signals, and stays after `close`."""

    is_leaving: ClassVar[bool] = False
    """Whether this process got a stop and has computed nothing since; then its exit code is not 0."""

    def __init__(self, guard: ExitGuard | None, run: RunContext = RunContext()) -> None:  # noqa: B008 - frozen
        self._run = run
        self._guard, self._own_guard = guard, guard is None
        self._agreement: StopAgreement | None = None
        self._found_at_start: str | None = None
        """Why all ranks stop before their first step."""
        self._steps = 0
        """Optimizer steps that were allowed to begin."""
        self._pace = Pace()
        self._ticked: float | None = None
        self._folder: RunFolder | None = None
        """The run's folder, on rank 0 of a run that has one: one rank warns, looks for the file, ..."""
        self._warned: set[str] = set()
        self.is_writing: Callable[[], bool] = lambda: False
        """Whether an earlier checkpoint is still being written, for which a stop has to wait."""

    def tick(self, place: RankContext) -> bool:
        """Return whether to stop now rather than begin the next optimizer step."""
        if self._agreement is None and self._found_at_start is None:
            self._begin(place)
        self._steps += self._agreement is not None
        StopController.is_leaving = self._agreement is None or self._ask(self._agreement)
        return StopController.is_leaving

    def _ask(self, agreement: StopAgreement) -> bool:
        now = time.monotonic()
        if self._ticked is not None:
            self._pace.add_step(now - self._ticked)
        stop = agreement.tick()
        self._ticked = time.monotonic()
        return stop

    def _begin(self, place: RankContext) -> None:
        if self._guard is None:
            self._guard = ExitGuard(StopSignals().__enter__(), read_limits(os.environ)).__enter__()
        info = place.info
        if info.rank == 0 and self._run.folder is not None:
            self._folder = self._run.folder
            self._recall_saves(self._folder)
        file = self._folder.stop_file if self._folder else None
        signals = self._guard.signals
        # An agreement takes a moment to spread; what came during the start is known before the first step.
        found = collectives.gather(signal_reason(signals, info.rank) or file_reason(file))
        self._found_at_start = next((reason for reason in found if reason), None)
        if self._found_at_start is None:
            self._agreement = StopAgreement(
                place.store,
                info.rank,
                info.world_size,
                signals=signals,
                stop_file=file,
                launch_id=info.launch_id,
            )
        self._guard.begin(self._mind_the_time if info.rank == 0 else None)
        self._warn()

    def _recall_saves(self, folder: RunFolder) -> None:
        try:
            saves = [event for event in folder.events() if event.get("event") == "saved"]
        except SlurmddpError:
            return  # A damaged record is told by what depends on it.
        for event in saves[-_PAST_SAVES:]:
            still_s, beside_s = event.get("seconds"), event.get("written_s", 0.0)
            if isinstance(still_s, (int, float)) and isinstance(beside_s, (int, float)):
                self._pace.add_save(still_s + beside_s)

    def _mind_the_time(self, now: float) -> None:
        """Ask for a stop at the last moment from which it can still succeed; called by the guard."""
        measured = replace(self._pace.measured, is_writing=self.is_writing())
        agreement, moment = self._agreement, last_safe_moment(self._limits, measured)
        # An attempt that could not even take a step would come back for ever.
        if agreement is not None and moment is not None and now >= moment and self._steps > 1:
            agreement.request("the time limit")

    @property
    def _limits(self) -> Limits:
        return self._guard.limits if self._guard is not None else Limits()

    def saved(self, seconds: float) -> None:
        """Take note that a save was durable after `seconds`, so that the next one is given enough time."""
        self._pace.add_save(seconds)
        self._warn()

    def stood_still(self) -> None:
        """Take note that the time since the last step was not a step's."""
        self._ticked = None

    def _warn(self) -> None:
        """Say once what is too short for a save of the length that was measured."""
        if self._folder is None:
            return
        for name, text in shortfalls(self._limits, self._pace.measured).items():
            if name not in self._warned:
                self._warned.add(name)
                log.warning(text)
                self._run.add_event("warned", about=name, text=text)

    @property
    def requested(self) -> bool:
        if self._found_at_start is not None:
            return True
        if self._agreement is not None:
            return self._agreement.requested
        return self._guard is not None and self._guard.signals.received is not None

    @property
    def reason(self) -> str | None:
        return self._agreement.reason if self._agreement else self._found_at_start

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        if self._own_guard and self._guard is not None:
            self._guard.close()
            self._guard.signals.__exit__(None, None, None)
            self._guard = None
