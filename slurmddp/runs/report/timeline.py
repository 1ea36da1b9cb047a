"""The timeline of a run, built event by event: when each attempt started, trained, saved and ended.

The module `goodput` explains the kinds of time.
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
    """The times of the events of an attempt's ranks, from their start to their end or to a restart in place.

    After a restart in place or a rollback, the same attempt has another AttemptTimeline.

    All times are in seconds since the epoch.
    """

    number: int
    begun: float
    waited: dict[str, float]
    """Seconds before the start, by kind."""
    ended: float = 0.0
    seen: float = 0.0
    """Time of the last event."""
    running: bool = False
    finished: bool = False
    resumed: int | None = None
    first: tuple[float, int] | None = None
    """Time and number of the first step."""
    loads: bool = True
    """Whether the program loads the run's checkpoints; if not, checkpoints of its own may keep its steps."""
    saves: list[tuple[float, float, int]] = field(default_factory=list)
    """Start and end of the pause for each save, and the step that the save holds."""
    copied: list[float] = field(default_factory=list)
    """Time of the step that each save holds."""
    left: float = _ENDLESS
    """Time after which no step was made, if an event records it."""
    stuck: float = _ENDLESS
    """Time from which a rank that hung held up all other ranks."""
    logged: LoggedStep | None = None
    gaps: Sequence[Gap] = ()
    """Times without a logged step in the attempt, also before or after a restart in place."""
    reached: tuple[float, int] | None = None
    """Time and number of the last step before the ranks restarted in place."""
    has_failed: bool = False
    """Whether an event records why these ranks had to end."""
    on_disk: int | None = None
    """The last step on disk, if the ranks resumed from a state in memory; None if they did not."""

    def add(self, event: Event, time: float) -> None:
        """Update the times with an event of the attempt, which happened at `time`."""
        kind = event.get("event")
        step = whole_number(event.get("step"))
        self.seen = max(self.seen, time)
        self.has_failed = self.has_failed or kind in ("rank_failed", "stalled", "restarted")

        if kind == "resumed" and step is not None:
            self.resumed = step
            if event.get("from") != "memory":
                self.on_disk = None
        elif kind == "first_step" and self.first is None:
            if step is None:
                step = 1
            self.first = (time, step)
            self.loads = event.get("loads") is not False
        elif kind == "saved" and self.first is not None and step is not None:
            self._add_save(event, time, step, self.first[0])
        elif kind in ("signalled", "rank_failed") and self.first is not None:
            self.left = min(self.left, time)
        elif kind == "stalled" and self.first is not None:
            self.stuck = min(self.stuck, time - (seconds_or_none(event.get("seconds")) or 0.0))
        elif kind == "saved" and self.on_disk is not None and step is not None:
            # These ranks have made no step yet: the agent has written a save that the ranks before the
            # restart had handed over to it.
            self.on_disk = step
        elif kind == "restarted" and self.first is not None and step is not None:
            # The last step was `silent_s` before the restart: the time until a lost node was noticed is not
            # training.
            last = time - (seconds_or_none(event.get("silent_s")) or 0.0)
            self.reached = (min(self.left, self.stuck, max(self.first[0], last)), step)

    def _add_save(self, event: Event, time: float, step: int, trained_since: float) -> None:
        """Add a save that was complete at `time`.

        Args:
            event: the `saved` event.
            time: when the save was complete.
            step: the step that the save holds.
            trained_since: when the ranks made their first step.
        """
        since = trained_since
        if self.saves:
            since = max(since, self.saves[-1][1])

        # The pause ended `written_s` before the save was complete: training continues while the file is
        # written.
        until = max(since, time - (seconds_or_none(event.get("written_s")) or 0.0))
        begun = max(since, until - (seconds_or_none(event.get("seconds")) or 0.0))
        self.saves.append((begun, until, step))

        # A save by an agent holds a state that a rank copied earlier; later steps are not in it.
        copied = seconds_or_none(event.get("copied"))
        if copied is None:
            self.copied.append(begun)
        else:
            self.copied.append(max(since, min(copied, begun)))

    def restarts(self, event: Event) -> bool:
        """Return whether an event shows that these ranks restarted or rolled back after their first step."""
        return self.first is not None and event.get("event") in ("resumed", "first_step")

    @property
    def start_step(self) -> int | None:
        """The step from which the ranks resumed; None if they ended before that."""
        if self.resumed is not None:
            return self.resumed
        if self.first is None:
            return None
        return max(0, self.first[1] - 1)

    def kept(self, next_start: float) -> float:
        """Return the last step of these ranks that was not lost.

        Later ranks continued from this step, or a save holds it.

        Args:
            next_start: the smallest step from which later ranks resumed; infinity if none did.
        """
        if self.running or self.finished or next_start < _ENDLESS:
            return next_start
        if self.saves:
            return self.saves[-1][2]
        if self.on_disk is not None:
            return self.on_disk
        return self.start_step or 0

    def parts(self, kept: float, records_steps: bool) -> dict[str, float]:
        """Return the seconds by kind of time, including the wait before the start.

        Args:
            kept: the last step that was not lost; steps after it count as lost.
            records_steps: whether the program records its first step.
        """
        if self.first is None:
            kind = "starting" if records_steps else "unknown"
            return {**self.waited, kind: self.ended - self.begun}

        began = self.first[0]
        starting = began - self.begun
        # If the program has checkpoints of its own, it is unknown which of its steps were lost.
        if not (self.loads or self.saves or self.running or self.finished):
            return {**self.waited, "starting": starting, "unknown": self.ended - began}

        left = min(self.left, self.ended)
        if self.finished and self.saves:
            left = min(left, self.saves[-1][0])
        kept_until = min(self._time_of(kept), left)

        saved_in_training = self._saving(began, kept_until)
        saved_in_lost_steps = self._saving(kept_until, left)
        saved_at_end = self._saving(left, self.ended)
        standing_still = self._standing_still(began, kept_until)
        return {
            **self.waited,
            "starting": starting,
            "training": kept_until - began - saved_in_training - standing_still,
            "lost": left - kept_until - saved_in_lost_steps + standing_still,
            "ending": self.ended - left - saved_at_end,
            "saving": math.fsum([saved_in_training, saved_in_lost_steps, saved_at_end]),
        }

    def _saving(self, since: float, until: float) -> float:
        return math.fsum(max(0.0, min(end, until) - max(begun, since)) for begun, end, _ in self.saves)

    def _standing_still(self, since: float, until: float) -> float:
        """Return how many seconds between two times passed in gaps without a step, as of a suspended job."""
        seconds = 0.0
        counted_until = since
        for gap in self.gaps:
            end = self._end_of(gap)
            # A gap before the second logged line does not count: the program may still compile. A gap with a
            # save in it counts as saving.
            if since <= gap.before and end is not None and not self._saving(gap.since, end):
                # Time is counted once: gaps may overlap if a clock was set back.
                stopped = max(gap.stopped, counted_until)
                seconds += max(0.0, min(end, until) - stopped)
                counted_until = max(counted_until, end)
        return seconds

    def _end_of(self, gap: Gap) -> float | None:
        """Return when a gap ended for these ranks: with their next logged line, or with their failure.

        The result is None if these ranks were not in this gap.
        """
        if gap.until <= self.ended:
            return gap.until

        # These ranks logged no later line. If they failed, the gap ended with the failure, if it was long
        # enough.
        failed = min(self.left, self.ended)
        if self.has_failed and gap.is_long(failed):
            return failed
        return None

    def _time_of(self, step: float) -> float:
        """Return when `step` was completed, interpolated between known times; infinity after the last one."""
        saves = [(copied, saved) for copied, (_, _, saved) in zip(self.copied, self.saves, strict=True)]
        # A save with exactly this number counts first: a program may number its saves by epochs, and between
        # epochs and steps nothing can be interpolated.
        for copied, saved in saves:
            if saved == step:
                return copied

        known = [*saves]
        if self.first is not None:
            known.insert(0, self.first)
        if self.reached is not None and known and self.reached[0] > known[-1][0]:
            known.append(self.reached)
        if self.logged is not None and known and self.logged.time > known[-1][0]:
            known.append((min(self.logged.time, self.ended), self.logged.step))

        for at, (time, reached) in enumerate(known):
            if reached >= step:
                earlier_time, earlier_step = known[max(0, at - 1)]
                if reached <= earlier_step:
                    return time
                share = (step - earlier_step) / (reached - earlier_step)
                return earlier_time + (time - earlier_time) * share
        return _ENDLESS


class Timeline:
    """The timeline of a run: attempts and the waits between them, built from events in their order."""

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
        """Time of a submission while an attempt had no recorded end."""

    def add(self, event: Event, time: float) -> None:
        """Update the timeline with the next event of the run, which happened at `time`."""
        kind = event.get("event")
        number = whole_number(event.get("attempt"))

        if kind == "submitted":
            # A submission is ignored if its job has started: the job may write `started` before sbatch
            # returns.
            if str(event.get("job_id")) in self._jobs:
                return
            if self._open is None:
                self._wait("queued", time)
            else:
                self._asked = time
        elif kind == "cancelled" and self._open is None:
            self._wait("idle" if self._waiting else "", time)
        elif kind == "cancelled" and self._open is not None:
            # An attempt without a recorded end lasted at least until its job was cancelled.
            self._open.seen = max(self._open.seen, time)
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
            again = event.get("next") in AGAIN or self._asked is not None
            self._asked = None
            self._wait("queued" if again else "idle", time)

    @property
    def _past(self) -> int:
        """The number of the last attempt that has ended; -1 if none has."""
        if not self._attempts:
            return -1
        return self._attempts[-1].number

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
        """End the current AttemptTimeline, and begin the next one for the ranks after a restart or rollback.

        Args:
            attempt: the current timeline.
            event: the `resumed` or `first_step` event of the ranks after the restart.
            time: the time of the event.
        """
        step = whole_number(event.get("step"))
        rolled_back = event.get("event") == "resumed" and not attempt.has_failed and step is not None
        if rolled_back:
            self._end(time)
        else:
            self._end(min(attempt.left, attempt.seen))

        self._open = AttemptTimeline(
            attempt.number,
            self._since,
            {},
            seen=self._since,
            logged=attempt.logged,
            gaps=attempt.gaps,
            on_disk=int(attempt.kept(_ENDLESS)),
        )
        # After a rollback the same processes continue to train, and record no further `first_step` event.
        if rolled_back and step is not None:
            self._open.first = (time, step)
            self._open.loads = attempt.loads
        attempt.logged = None

    def _end(self, time: float) -> None:
        if self._open is not None:
            self._open.ended = time
            self._attempts.append(self._open)
            self._open = None
            self._since = time

    def _end_without_event(self, time: float, *, again: bool) -> None:
        """End the open attempt, if there is one; it has recorded no end.

        Args:
            time: the latest time at which it can have ended.
            again: whether SLURM may have requeued its job.
        """
        attempt = self._open
        asked = self._asked
        self._asked = None
        if attempt is None:
            return

        ended = attempt.seen
        if attempt.logged is not None:
            ended = max(ended, attempt.logged.time)
        self._end(min(time, ended))

        self._waiting = "idle"
        if again and asked is None:
            self._waiting = "queued"
        if asked is not None:
            self._wait("queued", max(asked, self._since))

    def _wait(self, kind: str, time: float) -> None:
        """End the current kind of wait at `time`, and begin the wait `kind`; empty if an attempt begins."""
        if self._waiting:
            self._waited[self._waiting] = self._waited.get(self._waiting, 0.0) + time - self._since
        self._waiting = kind
        self._since = time

    def close(self, now: float, *, running: bool, pending: bool) -> None:
        """End the timeline: at `now` if it is running or pending, else with its last event or logged step."""
        if self._open is not None and running and self._asked is None:
            self._open.running = True
            self._end(now)

        self._end_without_event(now, again=True)
        if pending:
            self._wait("", now)

    def seconds(self, records_steps: bool) -> dict[int | None, dict[str, float]]:
        """Return the seconds by kind for each attempt; the key None is the time after the last attempt."""
        sums: dict[int | None, dict[str, float]] = {}
        start = _ENDLESS
        for attempt in reversed(self._attempts):
            attempt_sums = sums.setdefault(attempt.number, {})
            kept = attempt.kept(start)
            for kind, seconds in attempt.parts(kept, records_steps).items():
                attempt_sums[kind] = attempt_sums.get(kind, 0.0) + max(0.0, seconds)
            # An earlier attempt keeps no step above `kept` either, although this attempt may have resumed at
            # a higher step: it may have had a state in memory that a later attempt did not have.
            if attempt.start_step is not None:
                start = min(kept, attempt.start_step)

        if self._waited:
            sums[None] = self._waited
        return {number: _positive(parts) for number, parts in sums.items()}


def _positive(parts: Mapping[str, float]) -> dict[str, float]:
    return {kind: seconds for kind, seconds in parts.items() if seconds > 0}


def whole_number(value: Any) -> int | None:
    """Return `value` if it is an integer from 0 on, such as a step or the number of an attempt; else None."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value >= 0 else None
