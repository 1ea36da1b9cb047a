"""The timeline of a run, built event by event: when each attempt started, trained, saved and ended.

`goodput` explains the kinds of time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmddp.runs.folder.history import AGAIN
from slurmddp.runs.status.metrics import Gap, LoggedStep, seconds_or_none

_ENDLESS = math.inf
Event = Mapping[str, Any]


@dataclass
class AttemptTimeline:
    """The ranks of one attempt, from their start to their end; times in seconds since the epoch."""

    number: int
    begun: float
    waited: dict[str, float]
    ended: float = 0.0
    seen: float = 0.0
    """Time of the last event."""
    running: bool = False
    finished: bool = False
    resumed: int | None = None
    first: tuple[float, int] | None = None
    """Time and number of the first step."""
    loads: bool = True
    """Whether the program loads the run's checkpoints; else its own ones may keep steps."""
    saves: list[tuple[float, float, int]] = field(default_factory=list)
    """Begin and end of the pause for each save, and the step that the save holds."""
    copied: list[float] = field(default_factory=list)
    """Time of the step that each save holds."""
    left: float = _ENDLESS
    """Time after which no step was made, if an event says so."""
    stuck: float = _ENDLESS
    """Time from which a stuck rank held up all others."""
    logged: LoggedStep | None = None
    gaps: Sequence[Gap] = ()
    """Times without a logged step, also of other ranks of the attempt."""
    reached: tuple[float, int] | None = None
    """Time and number of the last step before the ranks restarted in place."""
    has_failed: bool = False
    """Whether an event records why these ranks had to end."""
    on_disk: int | None = None
    """The last step on disk when the ranks resumed from a state in memory; None for other ranks."""

    def add(self, event: Event, time: float) -> None:
        """Add one event of the attempt."""
        kind, step = event.get("event"), whole_number(event.get("step"))
        self.seen = max(self.seen, time)
        self.has_failed = self.has_failed or kind in ("rank_failed", "stalled", "restarted")
        if kind == "resumed" and step is not None:
            self.resumed = step
            self.on_disk = self.on_disk if event.get("from") == "memory" else None
        elif kind == "first_step" and self.first is None:
            self.first = (time, 1 if step is None else step)
            self.loads = event.get("loads") is not False
        elif kind == "saved" and self.first is not None and step is not None:
            since = max(self.first[0], self.saves[-1][1] if self.saves else 0.0)
            # Training continues while the writer writes.
            until = max(since, time - (seconds_or_none(event.get("written_s")) or 0.0))
            begun = max(since, until - (seconds_or_none(event.get("seconds")) or 0.0))
            self.saves.append((begun, until, step))
            # The save of an agent holds a state that a rank copied before its last steps.
            copied = seconds_or_none(event.get("copied"))
            self.copied.append(begun if copied is None else max(since, min(copied, begun)))
        elif kind in ("signalled", "rank_failed") and self.first is not None:
            self.left = min(self.left, time)
        elif kind == "stalled" and self.first is not None:
            self.stuck = min(self.stuck, time - (seconds_or_none(event.get("seconds")) or 0.0))
        elif kind == "saved" and self.on_disk is not None and step is not None:
            self.on_disk = step  # The earlier ranks had handed it over.
        elif kind == "restarted" and self.first is not None and step is not None:
            # The time without a step, for example until a lost node was noticed, is not training.
            last = time - (seconds_or_none(event.get("silent_s")) or 0.0)
            self.reached = (min(self.left, self.stuck, max(self.first[0], last)), step)

    def restarts(self, event: Event) -> bool:
        """Return whether `event` shows that ranks which made steps restarted in place or rolled back."""
        return self.first is not None and event.get("event") in ("resumed", "first_step")

    @property
    def start_step(self) -> int | None:
        """The step from which the ranks resumed; None if they did not get so far."""
        if self.resumed is not None:
            return self.resumed
        return None if self.first is None else max(0, self.first[1] - 1)

    def kept(self, next_start: float) -> float:
        """Return the last step that counts; `next_start`: the least step from which later ranks resumed."""
        if self.running or self.finished or next_start < _ENDLESS:
            return next_start
        if self.saves:
            return self.saves[-1][2]
        return (self.start_step or 0) if self.on_disk is None else self.on_disk

    def parts(self, kept: float, records_steps: bool) -> dict[str, float]:
        """Return the seconds by kind."""
        if self.first is None:
            return {**self.waited, "starting" if records_steps else "unknown": self.ended - self.begun}
        if not (self.loads or self.saves or self.running or self.finished):
            started = self.first[0] - self.begun
            return {**self.waited, "starting": started, "unknown": self.ended - self.first[0]}
        began, left = self.first[0], min(self.left, self.ended)
        if self.finished and self.saves:
            left = min(left, self.saves[-1][0])
        turn = min(self._time_of(kept), left)
        saved = [self._saving(*span) for span in ((began, turn), (turn, left), (left, self.ended))]
        stood_still = self._standing_still(began, turn)
        return {
            **self.waited,
            "starting": began - self.begun,
            "training": turn - began - saved[0] - stood_still,
            "lost": left - turn - saved[1] + stood_still,
            "ending": self.ended - left - saved[2],
            "saving": math.fsum(saved),
        }

    def _saving(self, since: float, until: float) -> float:
        return math.fsum(max(0.0, min(end, until) - max(begun, since)) for begun, end, _ in self.saves)

    def _standing_still(self, since: float, until: float) -> float:
        """Return the seconds without a step, for example of a suspended job."""
        seconds = 0.0
        counted_until = since
        for gap in self.gaps:
            end = self._end_of(gap)
            # The steps before the first line may still compile.
            if since <= gap.before and end is not None and not self._saving(gap.since, end):
                stopped = max(gap.stopped, counted_until)  # Gaps overlap if a clock was set back.
                seconds += max(0.0, min(end, until) - stopped)
                counted_until = max(counted_until, end)
        return seconds

    def _end_of(self, gap: Gap) -> float | None:
        """Return when a gap ended for these ranks: by a line or by their failure; None if they had no gap."""
        if gap.until <= self.ended:
            return gap.until
        # Other ranks logged the next line, after a restart in place, or nobody did.
        failed = min(self.left, self.ended)
        return failed if self.has_failed and gap.is_long(failed) else None

    def _time_of(self, step: float) -> float:
        """Return the time of `step`, interpolated between known steps; infinity after the last of them."""
        known = [] if self.first is None else [self.first]
        saves = [(copied, saved) for copied, (_, _, saved) in zip(self.copied, self.saves, strict=True)]
        for copied, saved in saves:
            if saved == step:  # A program may number its saves by epochs.
                return copied
        known += saves
        if self.reached is not None and known and self.reached[0] > known[-1][0]:
            known.append(self.reached)
        if self.logged is not None and known and self.logged.time > known[-1][0]:
            known.append((min(self.logged.time, self.ended), self.logged.step))
        for at, (time, reached) in enumerate(known):
            if reached >= step:
                before, passed = known[at - 1] if at else (time, reached)
                share = (step - passed) / (reached - passed) if reached > passed else 1.0
                return before + (time - before) * share
        return _ENDLESS


class Timeline:
    """All attempts of a run, in their order."""

    def __init__(self, logged: Mapping[int, LoggedStep], gaps: Mapping[int, Sequence[Gap]]) -> None:
        self._logged = logged
        self._gaps = gaps
        self._attempts: list[AttemptTimeline] = []
        self._open: AttemptTimeline | None = None
        self._jobs: set[str] = set()
        self._waiting = ""
        """The kind of the time between two attempts; empty within an attempt."""
        self._since = 0.0
        self._waited: dict[str, float] = {}
        self._asked: float | None = None
        """Time of a submission while an attempt seemed to run."""

    def add(self, event: Event, time: float) -> None:
        """Add the next event."""
        kind, number = event.get("event"), whole_number(event.get("attempt"))
        if kind == "submitted":
            if str(event.get("job_id")) in self._jobs:
                return  # The job wrote `started` before the submission was recorded.
            if self._open is None:
                self._wait("queued", time)
            else:
                self._asked = time
        elif kind == "cancelled" and self._open is None:
            self._wait("idle" if self._waiting else "", time)
        elif kind == "cancelled" and self._open is not None:
            self._open.seen = max(self._open.seen, time)  # The job ran at least until then.
        elif number is not None:
            self._add_of_attempt(event, number, time)

    def _add_of_attempt(self, event: Event, number: int, time: float) -> None:
        kind = event.get("event")
        if kind == "started" or (self._open is None and number > self._past):
            self._end_without_event(time, again=event.get("launcher") != "local")
            self._begin(event, number, time)
        elif self._open is not None and self._open.number == number and self._open.restarts(event):
            self._restart(self._open, event, time)
        if self._open is not None and self._open.number == number:
            self._open.add(event, time)
            if kind == "ended":
                self._open.finished = event.get("outcome") == "finished"
                self._end(time)
        if kind == "ended" and self._open is None and number == self._past:
            asked, self._asked = self._asked, None
            again = event.get("next") in AGAIN or asked is not None
            self._wait("queued" if again else "idle", time)

    @property
    def _past(self) -> int:
        return self._attempts[-1].number if self._attempts else -1

    def _begin(self, event: Event, number: int, time: float) -> None:
        self._jobs |= {str(event.get("job_id"))} - {"None"}
        self._wait("", time)
        self._open = AttemptTimeline(
            number,
            time,
            self._waited,
            seen=time,
            logged=self._logged.get(number),
            gaps=self._gaps.get(number, ()),
        )
        self._waited = {}

    def _restart(self, attempt: AttemptTimeline, event: Event, time: float) -> None:
        """Start the ranks of an attempt again at the end of the ranks before.

        Ranks that rolled back are the same processes: they train from the load on, without a `first_step`.
        """
        step = whole_number(event.get("step"))
        rolled_back = event.get("event") == "resumed" and not attempt.has_failed and step is not None
        self._end(time if rolled_back else min(attempt.left, attempt.seen))
        self._open = AttemptTimeline(
            attempt.number,
            self._since,
            {},
            seen=self._since,
            logged=attempt.logged,
            gaps=attempt.gaps,
            on_disk=int(attempt.kept(_ENDLESS)),
        )
        if rolled_back and step is not None:
            self._open.first = (time, step)
            self._open.loads = attempt.loads
        attempt.logged = None

    def _end(self, time: float) -> None:
        if self._open is not None:
            self._open.ended = time
            self._attempts.append(self._open)
            self._open, self._since = None, time

    def _end_without_event(self, time: float, *, again: bool) -> None:
        """End an attempt that wrote no end; `again`: the attempt may have been queued since."""
        attempt, asked, self._asked = self._open, self._asked, None
        if attempt is None:
            return
        logged = attempt.logged.time if attempt.logged is not None else 0.0
        self._end(min(time, max(attempt.seen, logged)))
        self._waiting = "queued" if again and asked is None else "idle"
        if asked is not None:
            self._wait("queued", max(asked, self._since))

    def _wait(self, kind: str, time: float) -> None:
        """Add the time until now to the current kind, and count the following time as `kind`."""
        if self._waiting:
            self._waited[self._waiting] = self._waited.get(self._waiting, 0.0) + time - self._since
        self._waiting, self._since = kind, time

    def close(self, now: float, *, running: bool, pending: bool) -> None:
        """End the timeline: at `now` if the run is running or pending."""
        if self._open is not None and running and self._asked is None:
            self._open.running = True
            self._end(now)
        self._end_without_event(now, again=True)
        if pending:
            self._wait("", now)

    def seconds(self, records_steps: bool) -> dict[int | None, dict[str, float]]:
        """Return the seconds of each attempt by kind; the key None holds the time after the last attempt."""
        sums: dict[int | None, dict[str, float]] = {}
        start = _ENDLESS
        for attempt in reversed(self._attempts):
            own, kept = sums.setdefault(attempt.number, {}), attempt.kept(start)
            for kind, seconds in attempt.parts(kept, records_steps).items():
                own[kind] = own.get(kind, 0.0) + max(0.0, seconds)
            if attempt.start_step is not None:
                start = min(kept, attempt.start_step)  # A state in memory ends with its attempt.
        if self._waited:
            sums[None] = self._waited
        return {number: {kind: s for kind, s in parts.items() if s > 0} for number, parts in sums.items()}


def whole_number(value: Any) -> int | None:
    """Return `value` if it is a step or the number of an attempt, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
