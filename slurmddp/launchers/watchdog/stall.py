"""Whether a node's ranks have come to a standstill: decided from their pages and the clock, nothing else.

Ranks in a collective wait for each other, so one that hangs holds up all; a time-out of the collective comes
half an hour later and names the ones that wait. Most of such time-outs have their cause on the CPU's side
(over 60 % in Meta's fleet, PyTorch blog of 2026-03-25), in a rank that never came to the collective, and a
longer time-out does not help them. So this asks what each rank does, and `culprit.py` which one holds up the
others.

It must never end a training that gets on. Therefore:

- A standstill is one of all watched ranks: as long as one shows signs of life, the others wait for it.
- A rank that is in code which shows no signs (`Beat.watched`: a program that does not use Distributon, what a
  loop does after its data) is not judged, nor are the ranks that wait for it.
- The limits are far above what is usual, and below the half hour of the collectives where those would end the
  training anyway: a compiled or autotuned first step may take long, a file server be away for minutes, a step
  in the middle be compiled again. They grow with what was seen: ten times the longest stretch of a phase that
  went well, at most 25 minutes above it. After a stall, a phase gets twice the time in the next generation,
  should the limit be wrong.
- Time counts while somebody looks: neither a laptop that sleeps (CLOCK_MONOTONIC stands still in between) nor
  a job that SLURM suspends, agent included, has stalled when it wakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmddp.host.heartbeat_page import Beat

LIMITS_S = {
    "meeting": 1500.0,  # It has a time-out of its own, which names who is missing.
    "loading": 3600.0,
    "first_step": 1500.0,
    "data": 900.0,
    "step": 300.0,
    "evaluating": 900.0,
    "saving": 1500.0,
    "ending": 1500.0,
}
"""How long a phase may go without a sign of life before anything is known; others may go for ever."""
START_UP = frozenset({"meeting", "loading", "first_step"})
"""Phases for which a person's time-out, meant for the training, is never shorter than the usual limit.

So it is for all that comes before a rank's first step: its first batch, a test save.
"""
_TIMES_THE_LONGEST = 10.0
_ABOVE_THE_LONGEST_S = 1500.0
_TIMES_THE_FIRST = 2.0
_LOOK_S = 5.0
"""The most that one look adds to a standstill; the agent looks once a second."""
_AGAIN = 0.25
"""After which part of its limit a standstill is told again."""


@dataclass(frozen=True)
class Stall:
    """No rank of this node has shown a sign of life for longer than it may; `rank` has for the longest."""

    rank: int
    phase: str
    step: int
    seconds: float
    limit_s: float


@dataclass
class _Stand:
    """How long a rank has stood as `beat` shows it."""

    beat: Beat
    seconds: float = 0.0


class Watchdog:
    """Follows the ranks of one node through the generations of an attempt.

    `timeout_s` None takes limits that are learnt, 0 never finds anything, another number is the limit for all
    that comes after the first step. Call `look` every few seconds.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._stands: dict[int, _Stand] = {}
        self._longest: dict[str, float] = {}
        self._patience: dict[str, float] = {}
        self._looked: float | None = None
        self._told: str | None = None
        """The phase of a stall that was told and that nothing has ended since."""
        self._since_told = 0.0

    def look(self, beats: Mapping[int, Beat], now: float) -> Stall | None:
        """Return the standstill of this node's ranks (`beats` by global rank), if there is one.

        It is told again once more time has gone by, for a caller that found others at work meanwhile.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, _LOOK_S)
        self._looked = now
        self._since_told += passed
        for rank in self._stands.keys() - beats.keys():
            del self._stands[rank]
        for rank, beat in beats.items():
            self._follow(rank, beat, now, passed)
        if not beats or not all(self.is_overdue(rank) for rank in beats):
            return None
        stall = self._describe()
        if self._told and self._since_told < max(1.0, _AGAIN * stall.limit_s):
            return None
        self._told, self._since_told = stall.phase, 0.0
        return stall

    def standing(self, rank: int, beat: Beat) -> float:
        """Return for how many seconds of looking a rank has shown no sign of life, by its newest `beat`."""
        stand = self._stands.get(rank)
        return stand.seconds if stand is not None and stand.beat.since == beat.since else 0.0

    def limit_s(self, beat: Beat) -> float | None:
        """Return how long a rank may stand like this; None: for ever."""
        if not beat.watched or self._timeout_s == 0 or beat.phase not in LIMITS_S:
            return None
        usual = LIMITS_S[beat.phase]
        if self._timeout_s is not None:
            starts = beat.phase in START_UP or beat.steps == 0
            return max(usual, self._timeout_s) if starts else self._timeout_s
        longest = self._longest.get(beat.phase, 0.0)
        learnt = min(_TIMES_THE_LONGEST * longest, longest + _ABOVE_THE_LONGEST_S)
        if beat.phase == "step":  # Usually the first is the longest; on a slow machine it is the measure.
            learnt = max(learnt, _TIMES_THE_FIRST * self._longest.get("first_step", 0.0))
        return max(usual, learnt) * self._patience.get(beat.phase, 1.0)

    def is_overdue(self, rank: int) -> bool:
        """Return whether a rank has stood for longer than it may."""
        stand = self._stands.get(rank)
        limit = self.limit_s(stand.beat) if stand else None
        return stand is not None and limit is not None and stand.seconds >= limit

    def _follow(self, rank: int, beat: Beat, now: float, passed: float) -> None:
        stand = self._stands.get(rank)
        if stand is not None and stand.beat.since == beat.since:
            stand.beat = beat
            stand.seconds += passed
            return
        if beat.phase == "starting" or (stand is not None and beat.steps < stand.beat.steps):
            self._begin_anew()
        elif stand is not None:
            before = stand.beat.phase
            self._longest[before] = max(self._longest.get(before, 0.0), stand.seconds)
            self._told = None
        self._stands[rank] = _Stand(beat, max(0.0, min(now - beat.since, passed)))

    def _begin_anew(self) -> None:
        """Take note that new ranks stand where old ones did; nothing was learnt from how those ended."""
        if self._told is not None:
            self._patience[self._told] = 2.0 * self._patience.get(self._told, 1.0)
            self._told = None

    def _describe(self) -> Stall:
        rank, stand = max(self._stands.items(), key=lambda item: item[1].seconds)
        beat = stand.beat
        limit = self.limit_s(beat) or 0.0
        return Stall(rank, beat.phase, beat.step, round(stand.seconds, 1), limit)
