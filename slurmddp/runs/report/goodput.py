"""Goodput: the share of a run's time that was training, and what the rest was, read from the run's events.

Each second since the first submission belongs to one kind:

queued    from a submission, or from the end of an attempt that is requeued, to the next `started`
starting  from `started` to `first_step`: set-up lines, imports, rendezvous, model, data, and the first step
training  after the first step, in steps that count; includes evaluations and waits for data
saving    pauses of the training for a checkpoint, as long as `saved` says
lost      in steps that the next checkpoint does not hold; repeated steps count as training.
          Also while slurmddp's own trainer stood still: in a gap between two lines of metrics, or
          between the last line and a failure
ending    from the last step of an attempt to its end, without the save
idle      from a final end, or a cancel, to the next submission or start
unknown   in attempts of a program that writes no `first_step`

An attempt without an `ended` event (its node was lost) ends with its last event or line of metrics, or with
the cancel of its job. The time after it is queued if SLURM requeued the run, although SLURM needed a part of
this time to notice. Without a queue, or until a person submits again, the time is idle. If a clock was set,
a time may contradict the order of the file. Such a time is replaced by the time of the line before.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmddp.runs.folder.history import RecordedAttempt, fold
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.timeline import Timeline
from slurmddp.runs.status.alive import is_alive
from slurmddp.runs.status.metrics import Gap, LoggedStep, latest, read_times, seconds_or_none
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.settings.spec import is_own_trainer

KINDS = ("training", "saving", "lost", "starting", "ending", "queued", "idle", "unknown")
"""All kinds of time, the most useful first."""
Parts = Mapping[str, float]
"""Seconds by kind."""


@dataclass(frozen=True)
class AttemptTime:
    """The time of one attempt and of the wait before it."""

    attempt: int | None
    """Number of the attempt; None: the time after the last one."""
    parts: Parts
    """Seconds by kind."""

    @property
    def whole(self) -> float:
        return math.fsum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """A run's time, split into training, saving, starting, queueing and lost time; in seconds."""

    share: float | None = None
    """Training divided by the whole; None if the program does not record its first step."""
    share_on_nodes: float | None = None
    """Training divided by the time in which the run had nodes."""
    whole: float = 0.0
    gpu_hours: float | None = None
    """GPUs of the run times the hours in which it had nodes; None for a run without GPUs."""
    rank_hours: float | None = None
    """The same for its ranks, if it has no GPUs."""
    parts: Parts = field(default_factory=dict)
    """Seconds by kind, all attempts together, without kinds that never occurred."""
    attempts: tuple[AttemptTime, ...] = ()

    @property
    def hours(self) -> float:
        """GPU-hours, or rank-hours of a run without GPUs."""
        return self.gpu_hours or self.rank_hours or 0.0

    @property
    def unit(self) -> str:
        """The unit of `hours`."""
        return "rank-hours" if self.gpu_hours is None else "GPU-hours"


def goodput_of(attempts: Sequence[AttemptTime], *, ranks: int = 0, gpus: int = 0) -> Goodput:
    """Return the goodput of a run with these attempts.

    Args:
        attempts: the times of the attempts.
        ranks: ranks of the run, on all nodes.
        gpus: GPUs of the run, on all nodes.
    """
    sums = {kind: math.fsum(attempt.parts.get(kind, 0.0) for attempt in attempts) for kind in KINDS}
    parts = {kind: seconds for kind, seconds in sums.items() if seconds > 0}
    whole = math.fsum(parts.values())
    on_nodes = whole - parts.get("queued", 0.0) - parts.get("idle", 0.0)

    share = share_on_nodes = None
    if parts and "unknown" not in parts:
        training = parts.get("training", 0.0)
        share = training / whole
        share_on_nodes = min(1.0, training / on_nodes) if on_nodes > 0 else None
    return Goodput(
        share=share,
        share_on_nodes=share_on_nodes,
        whole=whole,
        gpu_hours=on_nodes / 3600 * gpus if gpus else None,
        rank_hours=None if gpus else on_nodes / 3600 * ranks,
        parts=parts,
        attempts=tuple(attempts),
    )


def measure(
    events: Iterable[Any],
    *,
    now: float,
    running: bool = False,
    pending: bool = False,
    records_steps: bool = True,
    logged: Mapping[int, LoggedStep] | None = None,
    gaps: Mapping[int, Sequence[Gap]] | None = None,
    ranks: int = 0,
    gpus: int = 0,
) -> Goodput:
    """Return the goodput of a run.

    Args:
        events: the events of the run, in the order of the file.
        now: the end of the time, in seconds since the epoch, if the run is not over.
        running: whether an attempt without an end still runs.
        pending: whether the run will start again. The time of a run that is neither running nor pending ends
            with its last event or logged step.
        records_steps: whether the program writes `first_step`.
        logged: the last logged step of each attempt; needed only for an attempt without an end.
        gaps: the times of each attempt without a logged step.
        ranks: ranks of the run, on all nodes.
        gpus: GPUs of the run, on all nodes.
    """
    known = [event for event in events if isinstance(event, Mapping)]
    times = in_order([seconds_or_none(event.get("time")) for event in known])
    now = max([now, *times[-1:]])
    timeline = Timeline(logged or {}, gaps or {})
    for event, time in zip(known, times, strict=True):
        timeline.add(event, time)
    timeline.close(now, running=running, pending=pending)
    attempts = [AttemptTime(number, parts) for number, parts in timeline.seconds(records_steps).items()]
    attempts.sort(key=lambda time: math.inf if time.attempt is None else time.attempt)
    return goodput_of(attempts, ranks=ranks, gpus=gpus)


def in_order(times: Sequence[float | None]) -> list[float]:
    """Return times that never go back: the longest rising sequence stays, other times repeat the last."""
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


def read_goodput(folder: RunFolder, found: RunStatus, now: float) -> Goodput:
    """Return the goodput of the run in `folder`.

    If nothing shows how the run stands (SLURM does not answer, or a local run is on another machine), the
    time ends with the last event or line of metrics.

    Args:
        folder: of the run.
        found: the status of the run.
        now: in seconds since the epoch.

    Raises:
        SlurmddpError: the events can't be read.
    """
    events = folder.events()
    attempts = fold(events).attempts
    visible = found.state != "unknown" and not (attempts and _is_elsewhere(attempts[-1]))
    running = found.active and found.state in ("starting", "running", "cancelled", "unknown")
    without_end = sum(one.is_open for one in attempts)
    config = folder.config()
    is_own = is_own_trainer(config.get("program"))
    needs_last_step = without_end > running
    times = read_times(folder) if is_own or needs_last_step else None  # The file may be long.
    nodes = config.get("nodes") or 0
    return measure(
        events,
        now=now if visible else latest(folder).time or 0.0,
        running=running,
        pending=found.active and visible and found.state in ("queued", "stopped", "starting", "running"),
        records_steps=is_own or any(attempt.first_step is not None for attempt in attempts),
        logged=times.logged if times and needs_last_step else None,
        gaps=times.gaps if times and is_own else None,
        ranks=nodes * (config.get("ranks_per_node") or 0),
        gpus=nodes * (config.get("gpus_per_node") or 0),
    )


def _is_elsewhere(newest: RecordedAttempt) -> bool:
    return newest.launcher == "local" and newest.pid is not None and is_alive(newest) is None
