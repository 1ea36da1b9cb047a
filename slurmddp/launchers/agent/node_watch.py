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
        self._restart_count = -1
        self.deadline = 0.0
        """When to call `poll` at the latest, on the monotonic clock."""
        self._next_poll = self._next_pace = 0.0

    def poll(self, now: float, restart_count: int, *, some_left: bool = False) -> list[Report]:
        """Return the reports for the coordinator.

        Args:
            now: the time, on the monotonic clock.
            restart_count: the worker group that runs now.
            some_left: whether some of its ranks have ended well.
        """
        self._watch_group(restart_count)
        found: list[Report] = self._answer() if now >= self._answer_at else []
        if now >= self._next_poll:
            self._next_poll = now + _POLL_S
            found += self._poll_ranks(now, some_left)
        self.deadline = self._next_poll if self._request is None else now + _ASKING_POLL_S
        return found

    def _poll_ranks(self, now: float, some_left: bool) -> list[Report]:
        found: list[Report] = []
        beats = self._beats()
        if self._watchdog.poll(beats, now):
            found.append(HangSuspected())
        if some_left and self._request is None:
            found += self._poll_exits(beats, now)
        if now >= self._next_pace and beats:
            self._next_pace = now + LINE_EVERY_S
            paces = {rank: Pace.of(beat, self._host) for rank, beat in beats.items()}
            found.append(PaceReported(paces=paces))
        return found

    def request_stacks(self, restart_count: int) -> None:
        """Begin to collect the stacks of this node's ranks; `poll` returns the report."""
        self._watch_group(restart_count)
        if self._request is None:
            self.deadline = 0.0
            self._request = StackRequest(self._processes())
            if self._recorder is not None:
                self._recorder.request(self._processes())
                self._answer_at = time.monotonic() + _RECORDER_S

    def _watch_group(self, restart_count: int) -> None:
        """Drop a request for the stacks of an earlier worker group."""
        if restart_count != self._restart_count:
            self._restart_count = restart_count
            self._request, self._hung = None, False
            self._exits.forget()

    def _beats(self) -> dict[int, RankHeartbeat]:
        return {rank: page.read() for rank, (_, page) in self._processes().items()}

    def _poll_exits(self, beats: Mapping[int, RankHeartbeat], now: float) -> list[Report]:
        """Request the stacks of ranks that hang at their exit; withdraw `HungAtExit` when they work again."""
        pids = {rank: pid for rank, (pid, _) in self._processes().items()}
        before = self._hung
        self._hung = self._exits.poll({rank: (pids[rank], beat) for rank, beat in beats.items()}, now)
        if self._hung and not before:
            self.request_stacks(self._restart_count)
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
