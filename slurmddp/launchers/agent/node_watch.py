"""Watch the ranks of a node for its agent: read their heartbeats and, on request, their stacks.

The watch reports to the coordinator and decides nothing itself, because the ranks of one node may only wait
for ranks of another node (`watchdog/diagnosis.py`). The watch never blocks: the agent's loop calls `poll`.
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
from slurmddp.launchers.watchdog import stacks, stuck_rank
from slurmddp.launchers.watchdog.exit_watch import ExitWatch
from slurmddp.launchers.watchdog.hang import Watchdog
from slurmddp.launchers.watchdog.nccl_trace import FlightRecorder
from slurmddp.launchers.watchdog.stacks import StackRequest
from slurmddp.launchers.watchdog.stragglers import LINE_EVERY_S, Pace

_POLL_S = 1.0
_STACKS_POLL_S = 0.02
"""Seconds between two polls while ranks write their stacks."""
_RECORDER_S = 3.0
"""Seconds for NCCL's flight recorder to write its file; the recorder reads requests once a second."""


class NodeWatch:
    """Watches the ranks of one node for hangs, through all worker groups of an attempt.

    Args:
        timeout_s: the value of policy.stall_timeout_s.
        log_dir: the folder to which the stacks of hanging ranks are written.
        host: this node's host name.
        processes: returns the pid and the heartbeat page of each rank that runs, by global rank.
        flight_recorder: NCCL's flight recorder, if it is on.
    """

    def __init__(
        self,
        timeout_s: float | None,
        log_dir: Path,
        host: str,
        *,
        processes: Callable[[], Mapping[int, tuple[int, HeartbeatPage]]],
        flight_recorder: FlightRecorder | None = None,
    ) -> None:
        self._watchdog = Watchdog(timeout_s)
        self._exits = ExitWatch(timeout_s)
        self._hung = False
        """Whether all ranks that still run on this node hang at their exit."""
        self._log_dir = log_dir
        self._host = host
        self._processes = processes
        self._flight_recorder = flight_recorder
        self._request: StackRequest | None = None
        """The request for stacks that has not been answered yet."""
        self._answer_at = 0.0
        """The earliest time for the answer, so that NCCL's flight recorder can write its files."""
        self._restart_count = -1
        self.deadline = 0.0
        """When to call `poll` at the latest, on the monotonic clock."""
        self._next_poll = 0.0
        self._next_pace = 0.0

    def poll(self, now: float, restart_count: int, *, some_left: bool = False) -> list[Report]:
        """Return new reports for the coordinator (suspected hangs, requested stacks, paces); often none.

        Args:
            now: the time, on the monotonic clock.
            restart_count: the restart count of the worker group that runs now.
            some_left: whether ranks of this worker group, on any node, have ended with 0 or 75.
        """
        self._watch_group(restart_count)
        reports: list[Report] = []
        if now >= self._answer_at:
            reports += self._answer()
        if now >= self._next_poll:
            self._next_poll = now + _POLL_S
            reports += self._poll_ranks(now, some_left)

        self.deadline = self._next_poll if self._request is None else now + _STACKS_POLL_S
        return reports

    def _poll_ranks(self, now: float, some_left: bool) -> list[Report]:
        reports: list[Report] = []
        beats = self._beats()
        if self._watchdog.poll(beats, now):
            reports.append(HangSuspected())
        # Don't judge the exit of ranks while they write requested stacks: the writing counts as activity.
        if some_left and self._request is None:
            reports += self._poll_exits(beats, now)
        if now >= self._next_pace and beats:
            self._next_pace = now + LINE_EVERY_S
            paces = {rank: Pace.of(beat, self._host) for rank, beat in beats.items()}
            reports.append(PaceReported(paces=paces))
        return reports

    def request_stacks(self, restart_count: int) -> None:
        """Ask the ranks of this node for their stacks; a later `poll` returns the report.

        Do nothing if an earlier request is still open.
        """
        self._watch_group(restart_count)
        if self._request is not None:
            return

        self.deadline = 0.0
        self._request = StackRequest(self._processes())
        if self._flight_recorder is not None:
            self._flight_recorder.request(self._processes())
            self._answer_at = time.monotonic() + _RECORDER_S

    def _watch_group(self, restart_count: int) -> None:
        """If a new worker group runs, forget the open request for stacks and the hang of the earlier one."""
        if restart_count != self._restart_count:
            self._restart_count = restart_count
            self._request = None
            self._hung = False
            self._exits.forget()

    def _beats(self) -> dict[int, RankHeartbeat]:
        return {rank: page.read() for rank, (_, page) in self._processes().items()}

    def _poll_exits(self, beats: Mapping[int, RankHeartbeat], now: float) -> list[Report]:
        """Request stacks when all ranks that still run on this node begin to hang at their exit.

        Returns:
            When the ranks no longer hang, an empty `HungAtExit`, which withdraws the earlier report; else no
            reports.
        """
        pids = {rank: pid for rank, (pid, _) in self._processes().items()}
        has_hung = self._hung
        self._hung = self._exits.poll({rank: (pids[rank], beat) for rank, beat in beats.items()}, now)
        if self._hung and not has_hung:
            self.request_stacks(self._restart_count)

        return [HungAtExit()] if has_hung and not self._hung else []

    def _answer(self) -> list[Report]:
        """Write the requested stacks to the log folder, and return reports of them for the coordinator.

        Do nothing, and return an empty list, before all requested stacks have come.
        """
        if self._request is None or not self._request.poll():
            return []

        rank_stacks = self._request.stacks()
        self._request = None
        rank_reports = stuck_rank.reports(self._watchdog, self._beats(), rank_stacks, self._host)
        stacks.write(self._log_dir, rank_stacks, self._restart_count)

        reports: list[Report] = [StacksReported(reports=tuple(rank_reports))]
        if self._hung:
            # The ranks have just written their stacks, which must not count as activity at their exit.
            self._exits.rebase()
            silent_s = round(self._exits.silent_s, 1)
            hung = tuple(replace(report, seconds=silent_s) for report in rank_reports)
            reports.append(HungAtExit(reports=hung))
        return reports
