"""The attempts of a run, read event by event: when each began, trained, saved, ended, and what lay between.

The words for the time are those of `ledger`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmddp.runs.folder.history import AGAIN

_ENDLESS = math.inf
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Sign:
    """The last line that an attempt logged: its step, and when."""

    step: int
    time: float


@dataclass
class Life:
    """One attempt: when it began and ended, and what it wrote in between."""

    number: int
    begun: float
    waited: dict[str, float]
    ended: float = 0.0
    seen: float = 0.0
    """When it last wrote an event."""
    runs: bool = False
    finished: bool = False
    resumed: int | None = None
    first: tuple[float, int] | None = None
    """When the first step was done, and which it was."""
    saves: list[tuple[float, float, int]] = field(default_factory=list)
    """Of each save: from when to when training stood still, and the step that it holds."""
    copied: list[float] = field(default_factory=list)
    """When that step had been made, of each save."""
    left: float = _ENDLESS
    """From when on no step was made, as far as an event says so."""
    stood: float = _ENDLESS
    """From when on a rank held up all others, until that was noticed."""
    sign: Sign | None = None
    reached: tuple[float, int] | None = None
    """When its ranks made their last step before others took their places, and which it was."""
    on_disk: int | None = None
    """Of ranks that went on from a state in memory: the last step that the disk held then."""

    def note(self, event: Event, time: float) -> None:
        """Take in one event of the attempt."""
        kind, step = event.get("event"), whole_number(event.get("step"))
        self.seen = max(self.seen, time)
        if kind == "resumed" and step is not None:
            self.resumed = step
            self.on_disk = self.on_disk if event.get("from") == "memory" else None
        elif kind == "first_step" and self.first is None:
            self.first = (time, 1 if step is None else step)
        elif kind == "saved" and self.first is not None and step is not None:
            since = max(self.first[0], self.saves[-1][1] if self.saves else 0.0)
            # Training has gone on while the rest was written.
            until = max(since, time - (moment_of(event.get("written_s")) or 0.0))
            begun = max(since, until - (moment_of(event.get("seconds")) or 0.0))
            self.saves.append((begun, until, step))
            # The agent's save at the end holds what a rank had copied before its last steps.
            copied = moment_of(event.get("copied"))
            self.copied.append(begun if copied is None else max(since, min(copied, begun)))
        elif kind in ("signalled", "rank_failed") and self.first is not None:
            self.left = min(self.left, time)
        elif kind == "stalled" and self.first is not None:
            self.stood = min(self.stood, time - (moment_of(event.get("seconds")) or 0.0))
        elif kind == "saved" and self.on_disk is not None and step is not None:
            self.on_disk = step  # Those before had handed it over.
        elif kind == "restarted" and self.first is not None and step is not None:
            # What no step followed, until a lost node was missed say, was no training.
            last = time - (moment_of(event.get("silent_s")) or 0.0)
            self.reached = (min(self.left, self.stood, max(self.first[0], last)), step)

    def begins_anew(self, event: Event) -> bool:
        """Whether an event is that of ranks which have taken the place of those that made steps before."""
        return self.first is not None and event.get("event") in ("resumed", "first_step")

    @property
    def start_step(self) -> int | None:
        """The step it went on from; None when it did not get that far."""
        if self.resumed is not None:
            return self.resumed
        return None if self.first is None else max(0, self.first[1] - 1)

    def kept(self, next_start: float) -> float:
        """Return the last step that counts; `next_start` is the least from which a later one went on."""
        if self.runs or self.finished or next_start < _ENDLESS:
            return next_start
        if self.saves:
            return self.saves[-1][2]
        return (self.start_step or 0) if self.on_disk is None else self.on_disk

    def parts(self, kept: float, tells: bool) -> dict[str, float]:
        """Return its seconds by word."""
        if self.first is None:
            return {**self.waited, "starting" if tells else "untold": self.ended - self.begun}
        began, left = self.first[0], min(self.left, self.ended)
        if self.finished and self.saves:
            left = min(left, self.saves[-1][0])
        turn = min(self._moment(kept), left)
        saved = [self._saving(*span) for span in ((began, turn), (turn, left), (left, self.ended))]
        return {
            **self.waited,
            "starting": began - self.begun,
            "training": turn - began - saved[0],
            "lost": left - turn - saved[1],
            "ending": self.ended - left - saved[2],
            "saving": math.fsum(saved),
        }

    def _saving(self, since: float, until: float) -> float:
        return math.fsum(max(0.0, min(end, until) - max(begun, since)) for begun, end, _ in self.saves)

    def _moment(self, step: float) -> float:
        """Return when it stood at `step`; between two known moments in proportion, beyond them never."""
        known = [] if self.first is None else [self.first]
        saves = [(copied, saved) for copied, (_, _, saved) in zip(self.copied, self.saves, strict=True)]
        for copied, saved in saves:
            if saved == step:  # A program may count its saves in epochs, and the first step is step 1 too.
                return copied
        known += saves
        if self.reached is not None and known and self.reached[0] > known[-1][0]:
            known.append(self.reached)
        if self.sign is not None and known and self.sign.time > known[-1][0]:
            known.append((min(self.sign.time, self.ended), self.sign.step))
        for at, (time, reached) in enumerate(known):
            if reached >= step:
                before, passed = known[at - 1] if at else (time, reached)
                share = (step - passed) / (reached - passed) if reached > passed else 1.0
                return before + (time - before) * share
        return _ENDLESS


class Track:
    """The attempts of a run, one after the other."""

    def __init__(self, signs: Mapping[int, Sign]) -> None:
        self._signs = signs
        self._lives: list[Life] = []
        self._open: Life | None = None
        self._jobs: set[str] = set()
        self._waiting = ""
        """What the time between two attempts is, since when, and how much of it there was."""
        self._since = 0.0
        self._waited: dict[str, float] = {}
        self._asked: float | None = None
        """When the run was submitted while an attempt seemed to go on."""

    def take(self, event: Event, time: float) -> None:
        """Take in the next event."""
        kind, number = event.get("event"), whole_number(event.get("attempt"))
        if kind == "submitted":
            if str(event.get("job_id")) in self._jobs:
                return  # The job was faster than the one who submitted it, and wrote first.
            if self._open is None:
                self._wait("queued", time)
            else:
                self._asked = time
        elif kind == "cancelled" and self._open is None:
            self._wait("idle" if self._waiting else "", time)
        elif number is not None:
            self._take_from_attempt(event, number, time)

    def _take_from_attempt(self, event: Event, number: int, time: float) -> None:
        kind = event.get("event")
        if kind == "started" or (self._open is None and number > self._past):
            self._lose(time, again=event.get("launcher") != "local")
            self._begin(event, number, time)
        elif self._open is not None and self._open.number == number and self._open.begins_anew(event):
            self._begin_in_place(self._open)
        if self._open is not None and self._open.number == number:
            self._open.note(event, time)
            if kind == "ended":
                self._open.finished = event.get("outcome") == "finished"
                self._end(time)
        if kind == "ended" and self._open is None and number == self._past:
            asked, self._asked = self._asked, None
            again = event.get("next") in AGAIN or asked is not None
            self._wait("queued" if again else "idle", time)

    @property
    def _past(self) -> int:
        return self._lives[-1].number if self._lives else -1

    def _begin(self, event: Event, number: int, time: float) -> None:
        self._jobs |= {str(event.get("job_id"))} - {"None"}
        self._wait("", time)
        self._open = Life(number, time, self._waited, seen=time, sign=self._signs.get(number))
        self._waited = {}

    def _begin_in_place(self, life: Life) -> None:
        """Begin the ranks of an attempt again, from where the ones before them ended."""
        self._end(min(life.left, life.seen))
        held = int(life.kept(_ENDLESS))
        self._open = Life(life.number, self._since, {}, seen=self._since, sign=life.sign, on_disk=held)
        life.sign = None

    def _end(self, time: float) -> None:
        if self._open is not None:
            self._open.ended = time
            self._lives.append(self._open)
            self._open, self._since = None, time

    def _lose(self, time: float, *, again: bool) -> None:
        """End the attempt that left no end, if there is one; `again`: a queue may have had it since then."""
        life, asked, self._asked = self._open, self._asked, None
        if life is None:
            return
        sign = life.sign.time if life.sign is not None else 0.0
        self._end(min(time, max(life.seen, sign)))
        self._waiting = "queued" if again and asked is None else "idle"
        if asked is not None:
            self._wait("queued", max(asked, self._since))

    def _wait(self, word: str, time: float) -> None:
        """Count the time up to now as what it was, and from now on as `word`."""
        if self._waiting:
            self._waited[self._waiting] = self._waited.get(self._waiting, 0.0) + time - self._since
        self._waiting, self._since = word, time

    def close(self, now: float, *, runs: bool, waits: bool) -> None:
        """End the account: now, if the run goes on."""
        if self._open is not None and runs and self._asked is None:
            self._open.runs = True
            self._end(now)
        self._lose(now, again=True)
        if waits:
            self._wait("", now)

    def seconds(self, tells: bool) -> dict[int | None, dict[str, float]]:
        """Return the seconds of each attempt by word, and under None those after the last one."""
        sums: dict[int | None, dict[str, float]] = {}
        start = _ENDLESS
        for life in reversed(self._lives):
            own, kept = sums.setdefault(life.number, {}), life.kept(start)
            for word, seconds in life.parts(kept, tells).items():
                own[word] = own.get(word, 0.0) + max(0.0, seconds)
            if life.start_step is not None:
                start = min(kept, life.start_step)  # What is kept may be less: memory ends with an attempt.
        if self._waited:
            sums[None] = self._waited
        return {number: {word: s for word, s in parts.items() if s > 0} for number, parts in sums.items()}


def moment_of(value: Any) -> float | None:
    """Return a number of seconds that can be counted with, or None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < 1e15 else None


def whole_number(value: Any) -> int | None:
    """Return a step or the number of an attempt, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


@dataclass(frozen=True)
class Phases:
    """Seconds of each phase of one attempt, in their order.

    `launch` is what the ranks don't see: set-up lines, srun, the interpreter of the agent.
    """

    attempt: int
    seconds: Mapping[str, float]

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


def newest_phases(events: Iterable[Any]) -> Phases | None:
    """Return the phases of the newest attempt; None before its first step, or if its program tells none."""
    own: list[Mapping[str, Any]] = []
    newest: int | None = None
    for event in events:
        number = whole_number(event.get("attempt")) if isinstance(event, Mapping) else None
        if number is None or (newest is not None and number < newest):
            continue
        own, newest = (own if number == newest else []), number
        own.append(event)
    begun = next((event for event in own if event.get("event") == "started"), {})
    first = next((event for event in own if event.get("event") == "first_step"), {})
    told = first.get("phases")
    if newest is None or not isinstance(told, Mapping):
        return None
    seconds = {str(name): value for name in told if (value := moment_of(told[name])) is not None}
    since, until = moment_of(begun.get("time")), moment_of(first.get("time"))
    if since is not None and until is not None:
        seconds = {"launch": round(max(0.0, until - since - sum(seconds.values())), 3), **seconds}
    return Phases(newest, seconds) if seconds else None
