"""Fold the events of a run into one value per attempt, for status, logs, cancel and report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.text_format import counted

AGAIN = frozenset({"requeue", "resubmit"})
STOP_FILE = "stop_file"
"""The source of a stop in a `signalled` event: a person typed `slurmddp stop` or `cancel`."""
TIME_LIMIT = "time_limit"
"""The source of a stop in a `signalled` event: the time limit left too little time for another save."""
UNANSWERED = "unanswered"
"""The event of a submission that sbatch did not answer: its job may be in the queue."""


@dataclass(frozen=True, kw_only=True)
class RecordedAttempt:
    """One attempt; None means that the events do not say."""

    number: int
    job_id: str | None = None
    launcher: str | None = None
    allocation: str | None = None
    """The job of SLURM on whose nodes a local run is."""
    nodes: str | None = None
    pid: int | None = None
    process_start: str | None = None
    """Boot and clock tick of the start of process `pid`, which no other process shares."""
    host: str | None = None
    started: float | None = None
    ended: float | None = None
    seen: float | None = None
    """Time of the last event."""
    first_step: int | None = None
    loads: bool = True
    """Whether the program had asked for the run's checkpoints; else it may keep checkpoints of its own."""
    resumed_step: int | None = None
    again_at: float | None = None
    """Time of the last restart in place."""
    again_step: int | None = None
    """The step from which the ranks resumed then."""
    reached: Mapping[int, int | None] = field(default_factory=dict)
    """The last step before each restart in place, by the number of restarts until then; None if not seen."""
    saved_step: int | None = None
    saved: float | None = None
    signal: str | None = None
    exit_code: int | None = None
    outcome: str | None = None
    next: str | None = None
    progressed: bool = False
    """Whether the batch step has seen a newer checkpoint at the end than at the start."""
    reason: str | None = None
    """Why the batch step says that the attempt stopped."""
    setup_failure: str = ""
    """The first setup line that failed, and its exit code; the ranks started all the same."""
    without_progress: int | None = None
    """How many jobs in a row have reached their time limit without a newer checkpoint."""

    @property
    def is_open(self) -> bool:
        return self.ended is None

    @property
    def start_step(self) -> int | None:
        """The step from which the attempt resumed; 0 for a fresh start."""
        if self.resumed_step is not None:
            return self.resumed_step
        return 0 if self.first_step is not None and self.loads else None


def stop_source(event: Mapping[str, Any]) -> str | None:
    """Return what stopped the ranks, by a `signalled` event: a signal's name, STOP_FILE or TIME_LIMIT."""
    source = event.get("signal")
    text = str(source)
    # Events of earlier versions held a phrase: `the file /runs/a/stop`, `the time limit on rank 0`.
    if text.endswith("/stop"):
        return STOP_FILE
    return TIME_LIMIT if text.startswith("the time limit") else source


def restart_count(record: Mapping[str, Any]) -> int | None:
    """Return how often the ranks of the attempt had restarted in place, by an event or a record of a failure.

    None if the record does not hold the number.
    """
    # Records of earlier versions call the number `generation`.
    count = record.get("restart_count", record.get("generation"))
    return count if isinstance(count, int) else None


def stop_reason(source: str | None) -> str:
    """Return a source of a stop for people: `time limit`; empty for None."""
    shown = {"SIGUSR2": "time limit", TIME_LIMIT: "time limit", STOP_FILE: "on request"}
    return shown.get(source or "", source or "")


def why_stopped(attempt: RecordedAttempt) -> str:
    """Return the reason why an attempt stopped: `preempted`; empty if no event says.

    `requeued` is a requeue by a person, or a preemption without grace: SLURM does not tell them apart.
    """
    if attempt.reason:
        return attempt.reason
    reason = stop_reason(attempt.signal)
    if reason == "SIGTERM" and attempt.launcher == "slurm":
        return "requeued" if attempt.next in AGAIN or attempt.is_open else reason
    return reason


def how_ended(attempt: RecordedAttempt) -> str:
    """Return how an attempt ended, for people: `time limit, last save at step 200`."""
    if attempt.is_open:
        outcome = why_stopped(attempt) or "SLURM took it off its nodes"
    elif attempt.outcome == "stopped":
        outcome = why_stopped(attempt) or "stopped"
    else:
        outcome = (attempt.outcome or "no outcome given").replace("_", " ")
    failed = not attempt.is_open and attempt.outcome not in ("stopped", "finished", "cancelled")
    code = f", exit code {attempt.exit_code}" if failed and attempt.exit_code is not None else ""
    return outcome + code + _limits(attempt) + _saved(attempt)


def _limits(attempt: RecordedAttempt) -> str:
    """Return how many time limits in a row left no newer checkpoint; empty if none."""
    count = attempt.without_progress
    return f", {counted(count, 'time limit')} in a row without a newer checkpoint" if count else ""


def _saved(attempt: RecordedAttempt) -> str:
    """Name the last recorded save. Files that a script saves by itself, as by torch.save, have no record."""
    if attempt.saved_step is not None:
        return f", last save at step {attempt.saved_step}"
    may_save = attempt.first_step is not None and attempt.loads
    return ", no save recorded" if attempt.signal is not None or may_save else ""


@dataclass(frozen=True, kw_only=True)
class History:
    """All attempts of a run, and its jobs."""

    attempts: tuple[RecordedAttempt, ...] = ()
    last: str | None = None
    """The newest of submitted, unanswered, started, ended, cancelled."""
    job_id: str | None = None
    """The job that runs, or will run, the newest attempt."""
    open_jobs: tuple[str, ...] = ()
    """Jobs without an end, or that SLURM is to start again: a cancel must end these."""
    created: float | None = None
    """When the run was first submitted or started."""

    @property
    def newest(self) -> RecordedAttempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def last_saved(self) -> RecordedAttempt | None:
        """The newest attempt that recorded a save."""
        return next((one for one in reversed(self.attempts) if one.saved_step is not None), None)

    @property
    def goes_on(self) -> bool:
        """Whether the run continues: an open attempt, a queued job, or a job that will be requeued."""
        if self.last in (None, "cancelled"):
            return False
        newest = self.newest
        return self.last != "ended" or newest is None or newest.next in AGAIN

    @property
    def may_live(self) -> bool:
        """Whether the job or process may exist: the run continues, or it was cancelled and still leaves."""
        leaving = self.last == "cancelled" and self.newest is not None and self.newest.is_open
        return self.goes_on or leaving

    @property
    def settled(self) -> bool:
        """Whether the folder alone says how the run ended."""
        return self.last is not None and not self.goes_on


def read_history(folder: RunFolder) -> History:
    """Read the events of a run."""
    return fold(folder.events())


def is_unanswered(folder: RunFolder) -> bool:
    """Return whether sbatch did not answer the newest submission, so that only SLURM knows its job."""
    try:
        return read_history(folder).last == UNANSWERED
    except (SlurmddpError, OSError):
        return False  # The state of the run says that its events can't be read.


def of_newest_attempt(events: Iterable[Any]) -> tuple[int, list[Mapping[str, Any]]]:
    """Return the number of the newest attempt, 0 if there is none, and its events."""
    known = [one for one in events if isinstance(one, Mapping) and isinstance(one.get("attempt"), int)]
    newest = max((one["attempt"] for one in known), default=0)
    return newest, [one for one in known if one["attempt"] == newest]


def fold(events: Iterable[Any]) -> History:
    """Fold events into a History; skip events and facts that this version does not know."""
    attempts: dict[int, RecordedAttempt] = {}
    open_jobs: dict[str, None] = {}
    named: set[str] = set()
    early: set[str] = set()  # Jobs that wrote `started` before their submission was recorded.
    last = job_id = created = None
    for event in events:
        if not isinstance(event, Mapping):
            continue
        kind, job, number = event.get("event"), event.get("job_id"), event.get("attempt")
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
            created = event.get("time") if created is None else created
        if kind == "ended" and event.get("next") != "requeue":
            open_jobs.pop(str(job), None)
        if isinstance(number, int):
            known = attempts.get(number, RecordedAttempt(number=number))
            attempts[number] = replace(known, seen=event.get("time"), **_facts(known, event))
    ordered = tuple(attempts[number] for number in sorted(attempts))
    return History(attempts=ordered, last=last, job_id=job_id, open_jobs=tuple(open_jobs), created=created)


def _facts(known: RecordedAttempt, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an attempt that one event sets."""
    kind, time, step = event.get("event"), event.get("time"), event.get("step")
    if kind == "started":
        facts = {name: event.get(name) for name in ("launcher", "allocation", "pid", "process_start", "host")}
        nodes = event.get("nodes")
        job_id = None if event.get("job_id") is None else str(event["job_id"])
        return {**facts, "nodes": None if nodes is None else str(nodes), "job_id": job_id, "started": time}
    if kind == "ended":
        names = ("exit_code", "outcome", "next", "reason", "without_progress")
        progressed = event.get("progressed") is True
        return {"ended": time, "progressed": progressed, **{name: event.get(name) for name in names}}
    if kind == "saved":
        return {"saved_step": step, "saved": time}
    if kind == "restarted":
        return {"again_at": time, "again_step": None, "reached": {**known.reached, **_reached(event)}}
    if kind == "resumed":
        if known.first_step is None:
            return {"resumed_step": step, "again_step": None if known.again_at is None else step}
        return {"again_at": time if known.again_at is None else known.again_at, "again_step": step}
    if kind == "first_step":
        loads = known.loads and event.get("loads") is not False
        return {"first_step": step if known.first_step is None else known.first_step, "loads": loads}
    if kind == "warned" and not known.setup_failure:
        failure = event.get("failure") if event.get("about") == "setup" else None
        return {"setup_failure": str(failure)} if failure else {}
    return {"signal": stop_source(event)} if kind == "signalled" else {}


def _reached(restarted: Mapping[str, Any]) -> dict[int, int | None]:
    """Return the number of restarts before this one, and the last step until then, if one was seen."""
    count = restart_count(restarted)
    if count is None:
        return {}

    step = restarted.get("step")
    has_step = isinstance(step, int) and step >= 0
    return {count - 1: step if has_step else None}
