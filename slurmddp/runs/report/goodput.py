"""Where the time of a run went, from its first submission on: a partition of it, read from the run's events.

Every second belongs to one word:

queued    from a submission, or from the end of an attempt that is put back, to the next `started`
starting  from `started` to `first_step`: set-up lines, imports, rendezvous, model, data, and that step itself
training  after the first step, in steps that count; evaluations and waits for data are part of it
saving    training stood still for a checkpoint, as long as `saved` says
lost      in steps that the checkpoint does not hold with which the run went on, or would go on; when they
          are made once more, that is training
ending    from the last step of an attempt to its end, less the save
idle      nobody had asked for more: from a final end, or a cancel, to the next submission or start
untold    in attempts of a program that writes no `first_step`

An attempt that left no end (its node was lost) ends at its last sign of life, an event or a line of metrics.
What follows is queued time where SLURM put the run back, though a part of it went by before SLURM noticed;
without a queue, or until a person asked again, it is idle. Times that contradict the order of the file (a
clock that was set) are replaced by the time of the line before.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmddp.runs.folder.history import Attempt, fold
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.timeline import Sign, Track, moment_of
from slurmddp.runs.status import metrics
from slurmddp.runs.status.alive import is_alive
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.spec import is_own_trainer

WORDS = ("training", "saving", "lost", "starting", "ending", "queued", "idle", "untold")
"""From what is wanted to what is not."""
Parts = Mapping[str, float]


@dataclass(frozen=True)
class Entry:
    """The seconds of one attempt by word, with the wait before it; `attempt` None: after the last one."""

    attempt: int | None
    parts: Parts

    @property
    def whole(self) -> float:
        return math.fsum(self.parts.values())


@dataclass(frozen=True)
class Ledger:
    """The seconds of a whole run."""

    entries: tuple[Entry, ...] = ()

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by word, all attempts together; words that never occurred are left out."""
        sums = {word: math.fsum(one.parts.get(word, 0.0) for one in self.entries) for word in WORDS}
        return {word: seconds for word, seconds in sums.items() if seconds > 0}

    @property
    def whole(self) -> float:
        return math.fsum(self.parts.values())

    @property
    def goodput(self) -> float | None:
        """The share of the whole that went into training; None where the program does not tell."""
        parts = self.parts
        known = parts and "untold" not in parts
        return parts.get("training", 0.0) / math.fsum(parts.values()) if known else None

    @property
    def share_on_nodes(self) -> float | None:
        """The share that went into training of the time in which the run had nodes."""
        held = self.whole - self.parts.get("queued", 0.0) - self.parts.get("idle", 0.0)
        return None if self.goodput is None or held <= 0 else min(1.0, self.goodput * self.whole / held)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, seconds to a millisecond."""
        return {
            "goodput": None if self.goodput is None else round(self.goodput, 4),
            "share_on_nodes": None if self.share_on_nodes is None else round(self.share_on_nodes, 4),
            "whole": round(self.whole, 3),
            "parts": _rounded(self.parts),
            "attempts": [{"attempt": one.attempt, "parts": _rounded(one.parts)} for one in self.entries],
        }


def _rounded(parts: Parts) -> dict[str, float]:
    return {word: round(seconds, 3) for word, seconds in parts.items()}


def account(
    events: Iterable[Any],
    *,
    now: float,
    runs: bool = False,
    waits: bool = False,
    tells: bool = True,
    signs: Mapping[int, Sign] | None = None,
) -> Ledger:
    """Return the ledger of a run from its events, in the order of the file.

    `runs`: an attempt without an end still goes on. `waits`: something is still to come. Without either, the
    ledger ends with the last thing that is known. `tells`: the program writes `first_step`. `signs`: the last
    logged line of attempts; needed only where one left no end.
    """
    known = [event for event in events if isinstance(event, Mapping)]
    times = in_order([moment_of(event.get("time")) for event in known])
    now = max([now, *times[-1:]])
    track = Track(signs or {})
    for event, time in zip(known, times, strict=True):
        track.take(event, time)
    track.close(now, runs=runs, waits=waits)
    found = [Entry(number, parts) for number, parts in track.seconds(tells).items()]
    return Ledger(tuple(sorted(found, key=lambda one: math.inf if one.attempt is None else one.attempt)))


def in_order(times: Sequence[float | None]) -> list[float]:
    """Return times that never go back: as many as can stay as they are, the others as the one before them."""
    ends: list[float] = []
    holders: list[int] = []
    before: list[int] = []
    for at, time in enumerate(times):
        place = len(ends) if time is None else bisect_right(ends, time)
        before.append(holders[place - 1] if place else -1)
        if time is not None:
            ends[place : place + 1], holders[place : place + 1] = [time], [at]
    kept: set[int] = set()
    at = holders[-1] if holders else -1
    while at >= 0:
        kept.add(at)
        at = before[at]
    result, last = [], min((times[at] or 0.0 for at in kept), default=0.0)
    for at, time in enumerate(times):
        last = time if at in kept and time is not None else last
        result.append(last)
    return result


def read_ledger(
    folder: RunFolder, found: RunStatus, now: float, unwritten: Sequence[Mapping[str, Any]] = ()
) -> Ledger:
    """Return the ledger of a run that stands as `found` says; raises what reading its folder raises.

    `unwritten`: the end of its newest attempt, where that is about to be written. Where nobody sees how the
    run stands (SLURM is silent, a local run's process is elsewhere), it ends with the last sign of life.
    """
    events = [*folder.events(), *unwritten]
    attempts = fold(events).attempts
    seen = found.state != "unknown" and not (attempts and _is_out_of_sight(attempts[-1]))
    active = found.active and not unwritten
    runs = active and found.state in ("starting", "running", "cancelled", "unknown")
    without_end = sum(one.is_open for one in attempts)
    return account(
        events,
        now=now if seen else metrics.latest(folder).time or 0.0,
        runs=runs,
        waits=active and seen and found.state in ("queued", "stopped", "starting", "running"),
        tells=is_own_trainer(folder.config().get("program"))
        or any(one.first_step is not None for one in attempts),
        signs=_signs(folder) if without_end > runs else None,  # The file may be long.
    )


def _is_out_of_sight(newest: Attempt) -> bool:
    return newest.launcher == "local" and newest.pid is not None and is_alive(newest) is None


def _signs(folder: RunFolder) -> dict[int, Sign]:
    logged = metrics.read(folder)
    return {
        attempt: Sign(logged.reached[attempt], time)
        for attempt, time in logged.last_seen.items()
        if moment_of(time) is not None
    }
