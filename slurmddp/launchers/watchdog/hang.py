"""Decide whether the ranks of a node hang, from their heartbeat pages and the clock alone.

Ranks in a collective wait for each other, so one rank that hangs holds up all other ranks. The time-out of
the collective comes half an hour later and names the ranks that wait. Most such time-outs have their cause on
the CPU's side (over 60 % in Meta's fleet, PyTorch blog of 2026-03-25), in a rank that never reached the
collective. `stuck_rank.py` finds this rank.

The watchdog must never end a training that makes progress. Therefore:

- Ranks hang only if all watched ranks of the node are without a heartbeat for too long.
- A rank in code that shows no heartbeat (`RankHeartbeat.watched`) never counts as hung, nor do the ranks that
  wait for it.
- The limits are far above usual durations, and below the half hour of the collectives. A compiled or
  autotuned first step may take long, and a file server may be away for minutes. A limit grows to ten times
  the longest healthy duration of its phase, but exceeds it by at most 25 minutes. After a hang, the phase
  gets twice the time in the next worker group, in case the limit is wrong.
- Time counts only while the agent polls: neither a laptop that sleeps (CLOCK_MONOTONIC stands still) nor a
  job that SLURM suspends, agent included, has hung when it wakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmddp.host.heartbeat_page import RankHeartbeat

LIMITS_S = {
    "meeting": 1500.0,  # The rendezvous has a shorter time-out, which names the missing ranks.
    "loading": 3600.0,
    "first_step": 1500.0,
    "data": 900.0,
    "step": 300.0,
    "evaluating": 900.0,
    "saving": 1500.0,
    "ending": 1500.0,
}
"""The limits in seconds without a heartbeat, before durations are measured; other phases have no limit."""
START_UP = frozenset({"meeting", "loading", "first_step"})
"""Phases for which policy.stall_timeout_s never shortens the usual limit.

The same holds for everything before a rank's first step, such as its first batch.
"""
_TIMES_THE_LONGEST = 10.0
"""A limit grows to this multiple of the longest healthy duration of its phase."""
_ABOVE_THE_LONGEST_S = 1500.0
"""A limit exceeds the longest healthy duration by at most this many seconds."""
_TIMES_THE_FIRST = 2.0
"""The limit of a step grows at least to this multiple of the duration of the first step."""
LONGEST_POLL_S = 5.0
"""The largest number of seconds that a poll adds; the agent polls once a second."""
_AGAIN = 0.25
"""A hang that continues is reported again after this fraction of the limit of its phase."""


@dataclass
class _Silence:
    """A rank's heartbeat, and for how many seconds it has not changed."""

    beat: RankHeartbeat
    seconds: float = 0.0


class Watchdog:
    """Detects hangs of a node's ranks, through all worker groups of an attempt; call `poll` every second.

    Args:
        timeout_s: the value of policy.stall_timeout_s: the limit in seconds of every phase after the first
            step; None: limits that grow with the measured durations; 0: no limits.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._silences: dict[int, _Silence] = {}
        self._longest: dict[str, float] = {}
        """The longest healthy duration of each phase, in seconds."""
        self._patience: dict[str, float] = {}
        """For each phase in which ranks have hung, the factor by which its limit is multiplied."""
        self._polled_at: float | None = None
        self._reported: str | None = None
        """The phase of a hang that was reported and has not ended since."""
        self._since_report_s = 0.0

    def poll(self, beats: Mapping[int, RankHeartbeat], now: float) -> bool:
        """Return whether to report that all ranks of this node hang.

        A hang that continues is reported again only after the fraction `_AGAIN` of the limit.

        Args:
            beats: the heartbeats by global rank.
            now: the time, on the monotonic clock.
        """
        passed_s = 0.0
        if self._polled_at is not None:
            passed_s = min(now - self._polled_at, LONGEST_POLL_S)
        self._polled_at = now
        self._since_report_s += passed_s

        # Drop ranks that have ended: they hold up no other rank.
        for rank in self._silences.keys() - beats.keys():
            del self._silences[rank]
        for rank, beat in beats.items():
            self._follow(rank, beat, now, passed_s)

        if not beats or not all(self._is_overdue(silence) for silence in self._silences.values()):
            return False

        # Don't report the same hang at each poll.
        beat = max(self._silences.values(), key=lambda silence: silence.seconds).beat
        limit_s = self.limit_s(beat) or 0.0
        if self._reported and self._since_report_s < max(1.0, _AGAIN * limit_s):
            return False

        self._reported = beat.phase
        self._since_report_s = 0.0
        return True

    def silent_s(self, rank: int, beat: RankHeartbeat) -> float:
        """Return for how many seconds a rank has shown no new heartbeat; 0.0 if `beat` is a new one."""
        silence = self._silences.get(rank)
        if silence is None or silence.beat.since != beat.since:
            return 0.0
        return silence.seconds

    def limit_s(self, beat: RankHeartbeat) -> float | None:
        """Return the seconds that a rank may go without a heartbeat after `beat`; None: no limit."""
        if not beat.watched or self._timeout_s == 0 or beat.phase not in LIMITS_S:
            return None

        usual = LIMITS_S[beat.phase]
        if self._timeout_s is not None:
            # Before the first step the setting can't shorten the limit: it may be too short for imports,
            # loading and compilation.
            if beat.phase in START_UP or beat.steps == 0:
                return max(usual, self._timeout_s)
            return self._timeout_s

        longest = self._longest.get(beat.phase, 0.0)
        learnt = min(_TIMES_THE_LONGEST * longest, longest + _ABOVE_THE_LONGEST_S)
        # A later step may take as long as the first, which is usually the longest (compilation).
        if beat.phase == "step":
            learnt = max(learnt, _TIMES_THE_FIRST * self._longest.get("first_step", 0.0))

        return max(usual, learnt) * self._patience.get(beat.phase, 1.0)

    def _is_overdue(self, silence: _Silence) -> bool:
        limit = self.limit_s(silence.beat)
        return limit is not None and silence.seconds >= limit

    def _follow(self, rank: int, beat: RankHeartbeat, now: float, passed_s: float) -> None:
        """Update how long a rank has been silent, by its newest heartbeat.

        A new heartbeat ends the silence, whose length counts as a healthy duration of its phase.
        """
        silence = self._silences.get(rank)
        if silence is not None and silence.beat.since == beat.since:
            silence.beat = beat
            silence.seconds += passed_s
            return

        # A rank that is starting, or whose number of steps fell, was restarted: a new worker group runs.
        if beat.phase == "starting" or (silence is not None and beat.steps < silence.beat.steps):
            self._begin_group()
        elif silence is not None:
            phase = silence.beat.phase
            self._longest[phase] = max(self._longest.get(phase, 0.0), silence.seconds)
            self._reported = None

        # Count the new silence from the heartbeat, which the rank has written at some time since the last
        # poll.
        self._silences[rank] = _Silence(beat, max(0.0, min(now - beat.since, passed_s)))

    def _begin_group(self) -> None:
        """Double the limit of the phase of a reported hang, for the new worker group."""
        if self._reported is not None:
            self._patience[self._reported] = 2.0 * self._patience.get(self._reported, 1.0)
            self._reported = None
