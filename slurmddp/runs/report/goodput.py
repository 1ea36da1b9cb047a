"""Goodput: the share of a run's time that was training, and the kinds of its other time, by its events.

Each second since the first submission belongs to one kind:

queued    from a submission, or from the end of an attempt that is requeued, to the next `started`
starting  from `started` to `first_step`: set-up lines, imports, rendezvous, model, data, and the first step
training  after the first step, in steps that count; includes evaluations and waits for data
saving    pauses of the training for a checkpoint, as long as the event `saved` records
lost      in steps that no checkpoint kept; when the run repeats such steps, they count as training.
          Also while slurmddp's own trainer made no step: in a gap between two lines of metrics, or
          between the last line and a failure
ending    from the last step of an attempt to its end, without the save
idle      from a final end, or a cancel, to the next submission or start
unknown   in attempts of a program that writes no `first_step`

An attempt without an `ended` event (its node was lost) ends with its last event or line of metrics, or with
the cancel of its job. If SLURM requeued the run, the time after it counts as queued, although SLURM needed a
part of this time to notice the loss. Without a queue, or until a person submits again, the time is idle. If a
clock was set, the time of an event may be earlier than the time of the event before, which then replaces it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmddp.runs.folder.history import RecordedAttempt, fold
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.timeline import Timeline
from slurmddp.runs.status.alive import is_alive
from slurmddp.runs.status.metrics import Gap, LoggedStep, latest, read_times, seconds_or_none
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.settings.spec import is_own_trainer

KINDS = ("training", "saving", "lost", "starting", "ending", "queued", "idle", "unknown")
"""All kinds of time; the most useful kind comes first."""
Parts = Mapping[str, float]
"""Seconds by kind of time (see `KINDS`)."""


@dataclass(frozen=True)
class AttemptTime:
    """The time of an attempt and of the wait before it, split by kind."""

    attempt: int | None
    """Number of the attempt; None for the time after the last attempt."""
    parts: Parts
    """Seconds by kind."""

    @property
    def whole(self) -> float:
        return math.fsum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The wall time of a run, split into training, saving, starting, queueing and lost time; in seconds."""

    share: float | None = None
    """Training time divided by the whole time; None if the program does not record its first step."""
    share_on_nodes: float | None = None
    """Training time divided by the time in which the run had nodes."""
    whole: float = 0.0
    gpu_hours: float | None = None
    """Number of GPUs, times the hours in which the run had nodes; None for a run without GPUs."""
    rank_hours: float | None = None
    """Number of ranks, times the hours in which the run had nodes; None for a run with GPUs."""
    parts: Parts = field(default_factory=dict)
    """Seconds by kind of all attempts together; a kind that never occurred is missing."""
    attempts: tuple[AttemptTime, ...] = ()

    @property
    def hours(self) -> float:
        """The GPU-hours of the run, or its rank-hours if it has no GPUs."""
        return self.gpu_hours or self.rank_hours or 0.0

    @property
    def unit(self) -> str:
        """The unit of `hours`: "GPU-hours" or "rank-hours"."""
        return "rank-hours" if self.gpu_hours is None else "GPU-hours"


def goodput_of(attempts: Sequence[AttemptTime], *, ranks: int = 0, gpus: int = 0) -> Goodput:
    """Return the goodput of a run from the times of its attempts.

    Args:
        attempts: the times of the attempts.
        ranks: ranks of the run, on all nodes.
        gpus: GPUs of the run, on all nodes.
    """
    sums = {kind: math.fsum(attempt.parts.get(kind, 0.0) for attempt in attempts) for kind in KINDS}
    parts = {kind: seconds for kind, seconds in sums.items() if seconds > 0}
    whole = math.fsum(parts.values())
    on_nodes = whole - parts.get("queued", 0.0) - parts.get("idle", 0.0)

    share = None
    share_on_nodes = None
    if parts and "unknown" not in parts:
        training = parts.get("training", 0.0)
        share = training / whole
        if on_nodes > 0:
            share_on_nodes = min(1.0, training / on_nodes)

    goodput = Goodput(
        share=share, share_on_nodes=share_on_nodes, whole=whole, parts=parts, attempts=tuple(attempts)
    )
    if gpus:
        return replace(goodput, gpu_hours=on_nodes / 3600 * gpus)
    return replace(goodput, rank_hours=on_nodes / 3600 * ranks)


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
    """Return the goodput of a run from its events.

    Args:
        events: the events of the run, in the order of the file.
        now: the current time, in seconds since the epoch, with which the time of a run that continues ends.
        running: whether an attempt without an end still runs.
        pending: whether the run will start again. The time of a run that is neither running nor pending ends
            with its last event or logged step.
        records_steps: whether the program writes `first_step`.
        logged: the last logged step of each attempt; needed only for an attempt without an end.
        gaps: the long pauses between logged steps of each attempt; their time counts as lost.
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
    """Return times of events, corrected so that they never decrease even if a clock was set back.

    The longest sequence of times that never decreases is kept. Each other time, and each missing one, is
    replaced by the result before it. The sequence is found by patience sorting (C. Schensted, 1961), in
    O(n log n).
    """
    # Entry L: the smallest time with which a rising sequence of L + 1 times can end, and the index of this
    # time.
    ends: list[float] = []
    indices: list[int] = []
    # Entry I: the index of the predecessor of time I in the longest sequence that ends with it; -1 for none.
    before: list[int] = []
    for at, time in enumerate(times):
        # A missing time is part of no sequence.
        if time is None:
            before.append(-1)
            continue
        length = bisect_right(ends, time)
        before.append(indices[length - 1] if length else -1)
        ends[length : length + 1] = [time]
        indices[length : length + 1] = [at]

    kept: set[int] = set()
    at = indices[-1] if indices else -1
    while at >= 0:
        kept.add(at)
        at = before[at]

    ordered: list[float] = []
    last = min((times[at] or 0.0 for at in kept), default=0.0)
    for at, time in enumerate(times):
        if at in kept and time is not None:
            last = time
        ordered.append(last)
    return ordered


def read_goodput(folder: RunFolder, status: RunStatus, now: float) -> Goodput:
    """Return the goodput of the run in `folder`.

    If the state of the run is unknown (SLURM does not answer, or a local run is on another machine), the
    measured time ends with the last event or line of metrics.

    Args:
        folder: the run folder.
        status: the status of the run.
        now: the current time, in seconds since the epoch.

    Raises:
        SlurmddpError: the events can't be read.
    """
    events = folder.events()
    attempts = fold(events).attempts
    visible = status.state != "unknown" and not (attempts and _is_elsewhere(attempts[-1]))
    if not visible:
        now = latest(folder).time or 0.0
    running = status.active and status.state in ("starting", "running", "cancelled", "unknown")
    pending = status.active and visible and status.state in ("queued", "stopped", "starting", "running")

    config = folder.config()
    is_own = is_own_trainer(config.get("program"))
    logged: Mapping[int, LoggedStep] = {}
    gaps: Mapping[int, Sequence[Gap]] = {}
    needs_last_step = sum(attempt.is_open for attempt in attempts) > running
    # metrics.jsonl may be long, so read it only for gaps of the own trainer and for attempts without a
    # recorded end.
    if is_own or needs_last_step:
        times = read_times(folder)
        if needs_last_step:
            logged = times.logged
        if is_own:
            gaps = times.gaps

    nodes = config.get("nodes") or 0
    return measure(
        events,
        now=now,
        running=running,
        pending=pending,
        records_steps=is_own or any(attempt.first_step is not None for attempt in attempts),
        logged=logged,
        gaps=gaps,
        ranks=nodes * (config.get("ranks_per_node") or 0),
        gpus=nodes * (config.get("gpus_per_node") or 0),
    )


def _is_elsewhere(newest: RecordedAttempt) -> bool:
    """Return whether this machine can't find out if the process of a local attempt still runs."""
    return newest.launcher == "local" and newest.pid is not None and is_alive(newest) is None
