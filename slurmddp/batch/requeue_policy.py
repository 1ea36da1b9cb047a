"""Decide how an attempt ended and whether the run starts again: pure functions for laptop and batch step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_NO_PROGRESS,
    EXIT_STOPPED,
    EXIT_UNHEALTHY_NODE,
)

_STALLS = 2
"""A run ends after this many stopped attempts that started from one checkpoint and saved no newer one."""
_DELIBERATE = (EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNHEALTHY_NODE)
"""Exit codes by which a rank demands that the run ends, or that the next attempt avoids its node."""

RUNNING = "running"
TIMEOUT = "timeout"
PREEMPTED = "preempted"
CANCELLED = "cancelled"
REQUEUED = "requeued"
NODE_FAIL = "node_fail"
_BY_SLURM = (REQUEUED, PREEMPTED, NODE_FAIL)
"""States in which SLURM ended the ranks for its own reasons: their exit codes show no fault of the run."""


class RequeueRules(Protocol):
    """The keys of `policy` that decide whether a run starts again, from its configuration or `job.json`."""

    @property
    def requeue(self) -> bool: ...
    @property
    def max_restarts(self) -> int: ...
    @property
    def max_requeues_without_progress(self) -> int: ...


class Counts(NamedTuple):
    """Counts of failed, stopped and progressing attempts since a person last submitted the run."""

    failures: int = 0
    without_progress: int = 0
    """The number of attempts in a row that reached a time limit before they saved a newer checkpoint."""
    progressed: bool = False
    """Whether an attempt saved a newer checkpoint, and no later attempt failed before it saved one."""
    stalls: Mapping[str, int] = {}
    """For each checkpoint, the number of stopped attempts that started from it and saved no newer one."""


class End(NamedTuple):
    """The known facts about the end of one attempt; `decide` derives an `Outcome` from them."""

    code: int
    """The exit code of the attempt."""
    job_state: str = RUNNING
    """The state of the job when the attempt ended: `RUNNING`, `TIMEOUT` or another such constant."""
    progressed: bool = False
    """Whether the attempt left a newer checkpoint than it found."""
    latest: str = ""
    """The name of the newest checkpoint."""
    trained: bool = False
    """Whether the attempt has trained a step, or had the whole time limit to do so."""
    cancelled: bool = False
    """Whether a person has cancelled the run."""
    stop_asked: bool = False
    """Whether a person has stopped the run."""
    names_files: bool = False
    """Whether `program.checkpoints` names the files that the program saves."""
    near_limit: bool = False
    """Whether the job was so near its time limit that SLURM had sent the signal that precedes the limit."""
    failed_at_stop: bool = False
    """Whether a script failed after it had been asked to stop."""


class Outcome(NamedTuple):
    """The outcome of an attempt, and whether the run starts again; recorded in the event `ended`."""

    outcome: str
    """The kind of end: `finished`, `stopped`, `failed`, `config`, `no_progress`, `cancelled`, or
    `superseded`, which is never recorded."""
    next: str
    """The next action: `none` or `requeue`; or `resubmit`, which only the batch step writes."""
    code: int = EXIT_FINISHED
    without_progress: int = 0
    """`Counts.without_progress`, this attempt included."""
    stalled_at: str | None = None
    """The checkpoint from which the attempt started, if it trained and left no newer checkpoint."""
    advice: str = ""
    """Advice for the person, in which `{run}` stands for the name of the run."""
    reason: str = ""
    """The reason of a stop: `on request`, `preempted` or `time limit`; empty if it is not known."""


def count(before: Counts, event: Mapping[str, Any]) -> Counts:
    """Return the counts `before`, updated by one more event."""
    kind = event.get("event")
    if kind == "submitted" and not event.get("resubmitted"):
        return Counts()
    if kind != "ended":
        return before

    failed = event.get("outcome") == "failed"
    stalled_at = event.get("stalled_at")
    stalls = dict(before.stalls)
    if stalled_at is not None:
        stalls[stalled_at] = stalls.get(stalled_at, 0) + 1
    return Counts(
        # A failure that could not be requeued is recorded twice; the second record holds `requeued`.
        failures=before.failures + (failed and "requeued" not in event),
        without_progress=event.get("without_progress") or 0,
        progressed=bool(event.get("progressed")) or (before.progressed and not failed),
        stalls=stalls,
    )


def count_all(events: Iterable[Mapping[str, Any]]) -> Counts:
    """Return the counts after all events of a run."""
    counts = Counts()
    for event in events:
        counts = count(counts, event)
    return counts


def exit_code(
    code: int, *, failure: int | None, agents: int | None, job_state: str, progressed: bool
) -> int | None:
    """Return the exit code of an attempt; None if an agent recorded no code for an unknown reason.

    Args:
        code: the exit code of srun: the highest code of its tasks, killed tasks included. The code is 0 if
            SLURM gave a node up, and 1 if the kernel killed any process because memory ran out.
        failure: the exit code in the record of the first failure, 0 if the record holds no code; None without
            a record.
        agents: the result of `Attempt.common_exit_code`; None if an agent did not end with 0 or 75.
        job_state: the state of the job.
        progressed: whether the attempt left a newer checkpoint.
    """
    ended_well = code in (EXIT_FINISHED, EXIT_STOPPED)
    if failure is not None:
        if failure in _DELIBERATE:
            return failure
        return EXIT_FAILED if ended_well else code
    if agents is not None:
        return agents

    # SLURM killed the ranks at the time limit, but they had saved: the attempt was stopped and did not fail.
    if job_state == TIMEOUT and progressed and (ended_well or code > 128):
        return EXIT_STOPPED
    return None if ended_well else code


def decide(end: End, before: Counts, rules: RequeueRules) -> Outcome:
    """Decide the outcome of an attempt, and whether the job runs again.

    Args:
        end: the end of the attempt.
        before: the counts of the run without this attempt.
        rules: the rules of the run.
    """
    final = {EXIT_FINISHED: "finished", EXIT_CONFIG: "config", EXIT_NO_PROGRESS: "no_progress"}
    if end.code in final:
        return Outcome(final[end.code], "none", end.code)
    if end.cancelled or end.job_state == CANCELLED:
        return Outcome("cancelled", "none", end.code)

    may_run_again = rules.requeue and not end.stop_asked
    # Some programs save when they are asked to stop and then exit with an error. The newer checkpoint shows
    # that the save succeeded, so the attempt counts as stopped.
    has_saved_and_failed = end.failed_at_stop and end.progressed
    if end.code == EXIT_STOPPED or end.job_state in _BY_SLURM or has_saved_and_failed:
        return _stopped(end, before, rules, may_run_again)._replace(reason=_reason(end))

    # After exit code 76 the next attempt gets other nodes. If the last attempt had progressed, a bad node may
    # be the cause of the first failure without progress, so the run is tried again.
    is_hopeful = end.progressed or before.progressed or end.code == EXIT_UNHEALTHY_NODE
    runs_again = may_run_again and is_hopeful and before.failures < rules.max_restarts
    return Outcome("failed", _next(runs_again), end.code)


def _next(runs_again: bool) -> str:
    return "requeue" if runs_again else "none"


def _reason(end: End) -> str:
    """Return the reason of the stop, such as `preempted`; empty if it is not known."""
    if end.stop_asked:
        return "on request"
    if end.job_state == PREEMPTED:
        return "preempted"
    if end.job_state == TIMEOUT or (end.job_state == RUNNING and end.near_limit):
        return "time limit"
    return ""


def _stopped(end: End, before: Counts, rules: RequeueRules, may_run_again: bool) -> Outcome:
    """Return the outcome of a stopped attempt; the run ends if too many attempts stop without progress.

    Too many are `_STALLS` at one checkpoint, or more than `max_requeues_without_progress` time limits in a
    row.
    """
    if end.progressed:
        return Outcome("stopped", _next(may_run_again), end.code)

    # Only time limits count, because a preemption may come at any moment.
    at_limit = end.job_state in (RUNNING, TIMEOUT)
    without_progress = before.without_progress + at_limit
    stalled_at = end.latest if end.trained else None
    if may_run_again and stalled_at is not None and before.stalls.get(stalled_at, 0) + 1 >= _STALLS:
        advice = (
            f"Two attempts started from {end.latest or 'step 0'} and were stopped before they saved a newer "
            "checkpoint, so there is no third attempt. Allow more time for the start (time_limit=...) or for "
            "the save (policy.signal_lead_s=...): slurmddp resume {run} KEY=VALUE"
        )
        return Outcome("no_progress", "none", EXIT_NO_PROGRESS, 0, stalled_at, advice)

    if may_run_again and at_limit and without_progress > rules.max_requeues_without_progress:
        advice = _advice_on_limits(without_progress, end.names_files)
        return Outcome("no_progress", "none", EXIT_NO_PROGRESS, without_progress, None, advice)

    return Outcome("stopped", _next(may_run_again), end.code, without_progress, stalled_at)


def _advice_on_limits(count: int, names_files: bool) -> str:
    """Return advice for a run that `count` time limits in a row ended without a newer checkpoint.

    `{run}` in the text stands for the name of the run.
    """
    stopped = f"The run was stopped {count} times in a row at its time limit and left no newer checkpoint. "
    if names_files:
        return (
            stopped + "Allow more time for the start of its program and the work until the next save: "
            "slurmddp resume {run} time_limit=... (If the program has saved files, program.checkpoints does "
            "not name them.)"
        )
    return (
        stopped + "Name the files that the program saves: slurmddp resume {run} program.checkpoints=PATH "
        "(or raise policy.max_requeues_without_progress)."
    )
