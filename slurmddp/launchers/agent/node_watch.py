"""An agent's watch over its own ranks: it looks at their pages, and asks for their stacks when it is told to.

It reports to the coordinator (see `inquiry.py`), since one node's ranks may only wait for another's. It never
waits: the agent's loop calls `look`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from slurmddp.host.heartbeat_page import Beat, Pulse
from slurmddp.launchers.coordinator.messages import (
    HangSuspected,
    HungAtExit,
    PaceReported,
    Report,
    StacksReported,
)
from slurmddp.launchers.watchdog import stacks
from slurmddp.launchers.watchdog.exit_watch import ExitWatch
from slurmddp.launchers.watchdog.nccl_trace import FlightRecorder
from slurmddp.launchers.watchdog.stacks import StackRequest
from slurmddp.launchers.watchdog.stall import Watchdog
from slurmddp.launchers.watchdog.stragglers import LINE_EVERY_S, Pace
from slurmddp.launchers.watchdog.stuck_rank import reports

_LOOK_S = 1.0
_ASKING_LOOK_S = 0.02
_RECORDER_S = 3.0
"""What NCCL's recorder gets to write its file; it looks for requests once a second."""


class Watch:
    """The watch over one node's ranks through all generations of an attempt.

    `beats` gives what the pages of the ranks that run show, `processes` pid and page of each, both by global
    rank; `timeout_s` is policy.stall_timeout_s.
    """

    def __init__(
        self,
        timeout_s: float | None,
        log_dir: Path,
        host: str,
        *,
        beats: Callable[[], Mapping[int, Beat]],
        processes: Callable[[], Mapping[int, tuple[int, Pulse]]],
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._watchdog, self._exits = Watchdog(timeout_s), ExitWatch(timeout_s)
        self._hung = False
        """Whether all ranks here hang at their exit."""
        self._log_dir, self._host = log_dir, host
        self._beats, self._processes, self._recorder = beats, processes, recorder
        self._asked: StackRequest | None = None
        self._answer_at = 0.0
        self._generation = 0
        self._next_look = self._next_pace = 0.0

    def next_look(self) -> float:
        """Return when `look` is to be called at the latest, on the monotonic clock."""
        return time.monotonic() + _ASKING_LOOK_S if self._asked is not None else self._next_look

    def look(self, now: float, *, left_in: int | None = None) -> list[Report]:
        """Return the reports for the coordinator; calls before `next_look` cost nothing.

        `left_in`: the generation, once some of its ranks have left well, so that the others are to follow.
        """
        told: list[Report] = self._answer() if now >= self._answer_at else []
        if now < self._next_look:
            return told
        self._next_look = now + _LOOK_S
        beats = self._beats()
        if self._watchdog.look(beats, now) is not None:
            told.append(HangSuspected())
        if left_in is not None and self._asked is None:
            told += self._look_at_exits(beats, now, left_in)
        if now >= self._next_pace and beats:
            self._next_pace = now + LINE_EVERY_S
            paces = {rank: Pace.of(beat, self._host) for rank, beat in beats.items()}
            told.append(PaceReported(paces=paces))
        return told

    def _look_at_exits(self, beats: Mapping[int, Beat], now: float, generation: int) -> list[Report]:
        """Ask ranks that hang at their exit for their stacks; withdraw `HungAtExit` when they work again."""
        pids = {rank: pid for rank, (pid, _) in self._processes().items()}
        before = self._hung
        self._hung = self._exits.look({rank: (pids[rank], beat) for rank, beat in beats.items()}, now)
        if self._hung and not before:
            self.ask(generation)
        return [HungAtExit()] if before and not self._hung else []

    def ask(self, generation: int) -> None:
        """Begin to gather what this node's ranks do, as the coordinator has asked."""
        if self._asked is None:
            self._generation = generation
            self._asked = StackRequest(self._processes())
            if self._recorder is not None:
                self._recorder.request(self._beats())
                self._answer_at = time.monotonic() + _RECORDER_S

    def forget(self) -> None:
        """Give up what was asked: the ranks are being ended."""
        self._asked, self._hung = None, False
        self._exits.forget()

    def _answer(self) -> list[Report]:
        """Return the report once all stacks are there; they are also written beside the logs."""
        if self._asked is None or not self._asked.poll():
            return []
        found, self._asked = self._asked.stacks(), None
        own = reports(self._watchdog, self._beats(), found, self._host)
        stacks.write(self._log_dir, found, self._generation)
        told: list[Report] = [StacksReported(reports=tuple(own))]
        if self._hung:
            self._exits.rebase()
            silent_s = round(self._exits.silent_s, 1)
            told.append(HungAtExit(reports=tuple(replace(report, seconds=silent_s) for report in own)))
        return told
