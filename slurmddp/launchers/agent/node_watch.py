"""An agent's watch over the ranks of its node: it reads their heartbeats and, when asked, their stacks.

It reports to the coordinator, because the ranks of one node may only wait for ranks of another node
(`watchdog/diagnosis.py`). It never waits: the agent's loop calls `poll`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from slurmddp.host.heartbeat_page import HeartbeatPage, RankHeartbeat
from slurmddp.launchers.coordinator.messages import (
    HangSuspected,
    HungAtExit,
    PaceReported,
    Report,
    StacksReported,
)
from slurmddp.launchers.watchdog import stacks
from slurmddp.launchers.watchdog.exit_watch import ExitWatch
from slurmddp.launchers.watchdog.hang import Watchdog
from slurmddp.launchers.watchdog.nccl_trace import FlightRecorder
from slurmddp.launchers.watchdog.stacks import StackRequest
from slurmddp.launchers.watchdog.stragglers import LINE_EVERY_S, Pace
from slurmddp.launchers.watchdog.stuck_rank import reports

_POLL_S = 1.0
_ASKING_POLL_S = 0.02
_RECORDER_S = 3.0
"""Seconds for NCCL's recorder to write its file; it reads requests once a second."""


class NodeWatch:
    """The watch over one node's ranks through all worker groups of an attempt.

    Args:
        timeout_s: policy.stall_timeout_s.
        log_dir: the folder for stacks.
        host: this node's host.
        processes: returns pid and heartbeat page of each rank that runs, by global rank.
        recorder: NCCL's flight recorder, if it is on.
    """

    def __init__(
        self,
        timeout_s: float | None,
        log_dir: Path,
        host: str,
        *,
        processes: Callable[[], Mapping[int, tuple[int, HeartbeatPage]]],
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._watchdog, self._exits = Watchdog(timeout_s), ExitWatch(timeout_s)
        self._hung = False
        """Whether all ranks here hang at their exit."""
        self._log_dir, self._host = log_dir, host
        self._processes, self._recorder = processes, recorder
        self._request: StackRequest | None = None
        self._answer_at = 0.0
        self._restart_count = 0
        self._next_poll = self._next_pace = 0.0

    def next_deadline(self) -> float:
        """Return when to call `poll` at the latest, on the monotonic clock."""
        return time.monotonic() + _ASKING_POLL_S if self._request is not None else self._next_poll

    def poll(self, now: float, *, left_in: int | None = None) -> list[Report]:
        """Return the reports for the coordinator; a call before `next_deadline` costs nothing.

        `left_in` is the restart count of the worker group, once some of its ranks have ended well.
        """
        found: list[Report] = self._answer() if now >= self._answer_at else []
        if now < self._next_poll:
            return found
        self._next_poll = now + _POLL_S
        beats = self._beats()
        if self._watchdog.poll(beats, now):
            found.append(HangSuspected())
        if left_in is not None and self._request is None:
            found += self._poll_exits(beats, now, left_in)
        if now >= self._next_pace and beats:
            self._next_pace = now + LINE_EVERY_S
            paces = {rank: Pace.of(beat, self._host) for rank, beat in beats.items()}
            found.append(PaceReported(paces=paces))
        return found

    def request_stacks(self, restart_count: int) -> None:
        """Begin to collect the stacks of this node's ranks; `poll` returns the report."""
        if self._request is None:
            self._restart_count = restart_count
            self._request = StackRequest(self._processes())
            if self._recorder is not None:
                self._recorder.request(self._processes())
                self._answer_at = time.monotonic() + _RECORDER_S

    def forget(self) -> None:
        """Drop a request for stacks: the ranks are being ended."""
        self._request, self._hung = None, False
        self._exits.forget()

    def _beats(self) -> dict[int, RankHeartbeat]:
        return {rank: page.read() for rank, (_, page) in self._processes().items()}

    def _poll_exits(self, beats: Mapping[int, RankHeartbeat], now: float, restart_count: int) -> list[Report]:
        """Request the stacks of ranks that hang at their exit; withdraw `HungAtExit` when they work again."""
        pids = {rank: pid for rank, (pid, _) in self._processes().items()}
        before = self._hung
        self._hung = self._exits.poll({rank: (pids[rank], beat) for rank, beat in beats.items()}, now)
        if self._hung and not before:
            self.request_stacks(restart_count)
        return [HungAtExit()] if before and not self._hung else []

    def _answer(self) -> list[Report]:
        """Return the report once all stacks are there; they are also written beside the logs."""
        if self._request is None or not self._request.poll():
            return []
        found, self._request = self._request.stacks(), None
        own = reports(self._watchdog, self._beats(), found, self._host)
        stacks.write(self._log_dir, found, self._restart_count)
        found_reports: list[Report] = [StacksReported(reports=tuple(own))]
        if self._hung:
            self._exits.rebase()
            silent_s = round(self._exits.silent_s, 1)
            found_reports.append(
                HungAtExit(reports=tuple(replace(report, seconds=silent_s) for report in own))
            )
        return found_reports
