"""Fold the events of a run into a record of each attempt, for status, logs, cancel and report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.text_format import counted

AGAIN = frozenset({"requeue", "resubmit"})
"""Values of `next` in an `ended` event after which another attempt follows."""
STOP_FILE = "stop_file"
"""The source of a stop in a `signalled` event: a person typed `slurmddp stop` or `cancel`."""
TIME_LIMIT = "time_limit"
"""The source of a stop in a `signalled` event: the time limit left too little time for another save."""
UNANSWERED = "unanswered"
"""The event of a submission that sbatch did not answer: its job may be in the queue."""


@dataclass(frozen=True, kw_only=True)
class RecordedAttempt:
    """The state of one attempt according to the events of the run; a field is None if no event holds it."""

    number: int
    job_id: str | None = None
    launcher: str | None = None
    allocation: str | None = None
    """The SLURM job whose nodes a local run uses."""
    nodes: str | None = None
    pid: int | None = None
    process_start: str | None = None
    """Boot id and clock tick of the start of process `pid`; no other process has the same."""
    host: str | None = None
    started: float | None = None
    ended: float | None = None
    seen: float | None = None
    """Time of the last event."""
    first_step: int | None = None
    loads: bool = True
    """Whether the program uses the run's checkpoints; if False, it may keep checkpoints of its own."""
    resumed_step: int | None = None
    again_at: float | None = None
    """Time of the last restart in place."""
    again_step: int | None = None
    """The step from which the ranks resumed after that restart."""
    reached: Mapping[int, int | None] = field(default_factory=dict)
    """The last step before each restart in place, by the restart count before it; None if none was seen."""
    saved_step: int | None = None
    saved: float | None = None
    signal: str | None = None
    exit_code: int | None = None
    outcome: str | None = None
    next: str | None = None
    progressed: bool = False
    """Whether the batch step has seen a newer checkpoint at the end than at the start."""
    reason: str | None = None
    """Why the attempt stopped, as the batch step recorded it."""
    setup_failure: str = ""
    """The first setup line that failed, and its exit code; the ranks started nevertheless."""
    without_progress: int | None = None
    """How many jobs in a row have reached their time limit without saving a newer checkpoint."""

    @property
    def is_open(self) -> bool:
        return self.ended is None

    @property
    def start_step(self) -> int | None:
        """The step from which the attempt resumed; 0 for a fresh start."""
        if self.resumed_step is not None:
            return self.resumed_step
        is_fresh = self.first_step is not None and self.loads
        return 0 if is_fresh else None


def stop_source(event: Mapping[str, Any]) -> str | None:
    """Return what stopped the ranks according to a `signalled` event.

    This is the name of a signal, STOP_FILE or TIME_LIMIT; None if the event does not hold it.
    """
    source = event.get("signal")
    text = str(source)

    # Events of earlier versions held a phrase: `the file /runs/a/stop`, `the time limit on rank 0`.
    if text.endswith("/stop"):
        return STOP_FILE
    if text.startswith("the time limit"):
        return TIME_LIMIT
    return source


def restart_count(record: Mapping[str, Any]) -> int | None:
    """Return how often the ranks of an attempt had restarted in place when an event or failure was recorded.

    The result is None if the record does not hold the number.
    """
    # Records of earlier versions call the number `generation`.
    count = record.get("restart_count", record.get("generation"))
    return count if isinstance(count, int) else None


def stop_reason(source: str | None) -> str:
    """Return the text to show for a result of `stop_source`, such as `time limit`; empty for None."""
    shown = {"SIGUSR2": "time limit", TIME_LIMIT: "time limit", STOP_FILE: "on request"}
    return shown.get(source or "", source or "")


def why_stopped(attempt: RecordedAttempt) -> str:
    """Return why an attempt stopped, such as `preempted`; empty if no event holds a reason."""
    if attempt.reason:
        return attempt.reason

    reason = stop_reason(attempt.signal)
    is_requeued = attempt.next in AGAIN or attempt.is_open
    # SLURM sends SIGTERM for `scontrol requeue` and for a preemption without grace time. The word "requeued"
    # is right for both.
    if reason == "SIGTERM" and attempt.launcher == "slurm" and is_requeued:
        return "requeued"
    return reason


def how_ended(attempt: RecordedAttempt) -> str:
    """Return a phrase about the end of an attempt, such as `time limit, last save at step 200`."""
    if attempt.is_open:
        outcome = why_stopped(attempt) or "SLURM removed it from its nodes"
    elif attempt.outcome == "stopped":
        outcome = why_stopped(attempt) or "stopped"
    else:
        outcome = (attempt.outcome or "no outcome given").replace("_", " ")

    failed = not attempt.is_open and attempt.outcome not in ("stopped", "finished", "cancelled")
    if failed and attempt.exit_code is not None:
        outcome += f", exit code {attempt.exit_code}"
    return outcome + _limits(attempt) + _saved(attempt)


def _limits(attempt: RecordedAttempt) -> str:
    """Return a clause with the number of time limits in a row without a newer checkpoint; empty for none."""
    if not attempt.without_progress:
        return ""
    return f", {counted(attempt.without_progress, 'time limit')} in a row without a newer checkpoint"


def _saved(attempt: RecordedAttempt) -> str:
    """Return a clause that names the last recorded save, or states that the run has saved nothing.

    The result is empty if no save was recorded and the program may keep checkpoints of its own.
    """
    if attempt.saved_step is not None:
        return f", last save at step {attempt.saved_step}"

    # A script may save by itself, as with torch.save, which leaves no record. So the absence of a save is
    # named only after a signal, or if the program uses the run's checkpoints.
    uses_checkpoints = attempt.first_step is not None and attempt.loads
    return ", no save recorded" if attempt.signal is not None or uses_checkpoints else ""


@dataclass(frozen=True, kw_only=True)
class History:
    """All attempts of a run, and its jobs."""

    attempts: tuple[RecordedAttempt, ...] = ()
    last: str | None = None
    """The name of the newest event among submitted, unanswered, started, ended and cancelled."""
    job_id: str | None = None
    """The job that runs, or will run, the newest attempt."""
    open_jobs: tuple[str, ...] = ()
    """Jobs without a recorded end, and jobs that SLURM will requeue: `slurmddp cancel` must end them."""
    created: float | None = None
    """When the run was first submitted or started."""

    @property
    def newest(self) -> RecordedAttempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def last_saved(self) -> RecordedAttempt | None:
        """The newest attempt that recorded a save; None if no attempt has."""
        newest_first = reversed(self.attempts)
        return next((attempt for attempt in newest_first if attempt.saved_step is not None), None)

    @property
    def goes_on(self) -> bool:
        """Whether the run continues: an open attempt, a queued job, or a job that will be requeued."""
        if self.last in (None, "cancelled"):
            return False
        newest = self.newest
        return self.last != "ended" or newest is None or newest.next in AGAIN

    @property
    def may_live(self) -> bool:
        """Whether the job or process may exist: the run continues, or was cancelled and is still ending."""
        is_ending = self.last == "cancelled" and self.newest is not None and self.newest.is_open
        return self.goes_on or is_ending

    @property
    def settled(self) -> bool:
        """Whether the run has ended according to its events, without a query to SLURM."""
        return self.last is not None and not self.goes_on


def read_history(folder: RunFolder) -> History:
    """Return the attempts and jobs of a run, as the events in its folder describe them."""
    return fold(folder.events())


def is_unanswered(folder: RunFolder) -> bool:
    """Return whether sbatch did not answer the newest submission: a job with an unknown id may be queued."""
    try:
        return read_history(folder).last == UNANSWERED
    except (SlurmddpError, OSError):
        # The error is reported elsewhere: `slurmddp status` reports that the events can't be read.
        return False


def of_newest_attempt(events: Iterable[Any]) -> tuple[int, list[Mapping[str, Any]]]:
    """Return the number of the newest attempt, 0 if there is none, and its events."""
    known = [
        event for event in events if isinstance(event, Mapping) and isinstance(event.get("attempt"), int)
    ]
    newest = max((event["attempt"] for event in known), default=0)
    return newest, [event for event in known if event["attempt"] == newest]


def fold(events: Iterable[Any]) -> History:
    """Return the History that the events of a run describe; unknown events and fields are ignored."""
    attempts: dict[int, RecordedAttempt] = {}
    # A dict in place of a set: it keeps the order in which the jobs were submitted.
    open_jobs: dict[str, None] = {}
    named: set[str] = set()
    # Jobs whose `started` event precedes their `submitted` event: they began before `sbatch` returned.
    early: set[str] = set()
    last = None
    job_id = None
    created = None

    for event in events:
        if not isinstance(event, Mapping):
            continue
        kind = event.get("event")
        job = event.get("job_id")
        number = event.get("attempt")

        if kind == "submitted" and str(job) in early:
            early.remove(str(job))
            continue
        if kind in ("submitted", UNANSWERED, "started", "ended", "cancelled"):
            last = kind

        if job is not None and kind in ("submitted", "started"):
            job_id = str(job)
            if kind == "started" and job_id not in named:
                early.add(job_id)
            named.add(job_id)
            open_jobs[job_id] = None
            if created is None:
                created = event.get("time")
        # A job that SLURM requeues keeps its id, so it stays open; a resubmission has another job.
        if kind == "ended" and event.get("next") != "requeue":
            open_jobs.pop(str(job), None)

        if isinstance(number, int):
            known = attempts.get(number, RecordedAttempt(number=number))
            attempts[number] = replace(known, seen=event.get("time"), **_facts(known, event))

    ordered = tuple(attempts[number] for number in sorted(attempts))
    return History(attempts=ordered, last=last, job_id=job_id, open_jobs=tuple(open_jobs), created=created)


def _facts(known: RecordedAttempt, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of RecordedAttempt that `event` changes, with their new values."""
    kind = event.get("event")
    time = event.get("time")
    step = event.get("step")

    if kind == "started":
        facts = {name: event.get(name) for name in ("launcher", "allocation", "pid", "process_start", "host")}
        texts = {name: _text(event.get(name)) for name in ("nodes", "job_id")}
        return {**facts, **texts, "started": time}
    if kind == "ended":
        names = ("exit_code", "outcome", "next", "reason", "without_progress")
        progressed = event.get("progressed") is True
        return {"ended": time, "progressed": progressed, **{name: event.get(name) for name in names}}

    if kind == "saved":
        return {"saved_step": step, "saved": time}
    if kind == "restarted":
        return {"again_at": time, "again_step": None, "reached": {**known.reached, **_reached(event)}}
    if kind == "resumed":
        return _resumed(known, event)
    if kind == "first_step":
        loads = known.loads and event.get("loads") is not False
        first_step = step if known.first_step is None else known.first_step
        return {"first_step": first_step, "loads": loads}

    if kind == "warned" and event.get("about") == "setup" and event.get("failure"):
        return {"setup_failure": known.setup_failure or str(event["failure"])}
    if kind == "signalled":
        return {"signal": stop_source(event)}
    return {}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _resumed(known: RecordedAttempt, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an attempt that a `resumed` event changes (see `_facts`)."""
    step = event.get("step")
    # No rank has made a step yet, so this is the step from which the attempt starts, even after a restart in
    # place.
    if known.first_step is None:
        is_restarted = known.again_at is not None
        return {"resumed_step": step, "again_step": step if is_restarted else None}

    # Without a restart in place, the trainer has rolled back to a checkpoint. The rollback counts as a
    # restart, at the time of the rollback.
    again_at = event.get("time") if known.again_at is None else known.again_at
    return {"again_at": again_at, "again_step": step}


def _reached(restarted: Mapping[str, Any]) -> dict[int, int | None]:
    """Return an entry of `RecordedAttempt.reached` for a `restarted` event.

    The key is the restart count before the restart, the value the last step before it (None if no step was
    seen). The entry is empty if the event holds no restart count.
    """
    count = restart_count(restarted)
    if count is None:
        return {}

    step = restarted.get("step")
    has_step = isinstance(step, int) and step >= 0
    return {count - 1: step if has_step else None}
