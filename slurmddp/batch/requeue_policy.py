"""Decide how an attempt ended and what comes next: pure, the same on a laptop and in the batch step."""

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
"""After this many stopped attempts at one checkpoint, another attempt would stop there as well."""
_DELIBERATE = (EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNHEALTHY_NODE)

RUNNING, TIMEOUT, PREEMPTED = "running", "timeout", "preempted"
CANCELLED, REQUEUED, NODE_FAIL = "cancelled", "requeued", "node_fail"
_BY_SLURM = (REQUEUED, PREEMPTED, NODE_FAIL)
"""SLURM ended the ranks for a reason of its own, so that their failure says nothing about the run."""


class Policy(Protocol):
    """The keys of `policy` by which a run runs again, from its configuration or from its `job.json`."""

    @property
    def requeue(self) -> bool: ...
    @property
    def max_restarts(self) -> int: ...
    @property
    def max_requeues_without_progress(self) -> int: ...


class Counts(NamedTuple):
    """Counts of the events since a person last submitted the run."""

    failures: int = 0
    without_progress: int = 0
    """Time limits in a row that left no newer checkpoint."""
    progressed: bool = False
    """Whether an attempt progressed, and none failed without progress after it."""
    stalls: Mapping[str, int] = {}
    """For each checkpoint, the stopped attempts that started from it and left no newer one."""


class End(NamedTuple):
    """The end of one attempt."""

    code: int
    fate: str = RUNNING
    """The job's state for SLURM at that moment: one of the names above."""
    progressed: bool = False
    """Whether the attempt left a newer checkpoint than it found."""
    latest: str = ""
    """The name of the newest checkpoint."""
    trained: bool = False
    """Whether the training had begun, or had the whole time limit for that."""
    cancelled: bool = False
    stop_asked: bool = False
    """Whether a person asked for the stop."""
    names_files: bool = False
    """Whether `program.checkpoints` names the files that the program saves."""
    near_limit: bool = False
    """Whether the job had come so near its time limit that SLURM had sent the signal for it."""
    failed_at_stop: bool = False
    """Whether a script failed after it had been asked to stop."""


class Outcome(NamedTuple):
    """The meaning of an attempt's end, in the words of the `ended` event."""

    outcome: str
    """`finished`, `stopped`, `failed`, `config`, `no_progress`, `cancelled`; not recorded: `superseded`."""
    next: str
    """`none` or `requeue`; the batch step writes `resubmit` where the site refuses to requeue."""
    code: int = EXIT_FINISHED
    without_progress: int = 0
    stalled_at: str | None = None
    """The checkpoint that the attempt started from and did not get past."""
    advice: str = ""
    reason: str = ""
    """Why the attempt stopped: `on request`, `preempted`, `time limit`; empty if that is not known."""


def count(before: Counts, event: Mapping[str, Any]) -> Counts:
    """Return the counts after one more event."""
    kind = event.get("event")
    if kind == "submitted" and not event.get("resubmitted"):
        return Counts()
    if kind != "ended":
        return before
    failed, stalled_at = event.get("outcome") == "failed", event.get("stalled_at")
    stalls = dict(before.stalls)
    if stalled_at is not None:
        stalls[stalled_at] = stalls.get(stalled_at, 0) + 1
    return Counts(
        # A failure that could not be requeued is recorded twice.
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
    code: int, *, failure: int | None, agents: int | None, fate: str, progressed: bool
) -> int | None:
    """Return the exit code of an attempt; None if an agent is gone and nothing says why.

    Args:
        code: the exit code of srun: the highest code of its tasks, killed tasks included. It is 0 if SLURM
            gave a node up, and 1 if the kernel killed any process for want of memory.
        failure: the exit code in the record of the first failure, 0 if the record holds no code; None without
            a record.
        agents: the common exit code that the agents left; None if an agent did not end well.
        fate: the job's state for SLURM.
        progressed: whether the attempt left a newer checkpoint.
    """
    ended_well = code in (EXIT_FINISHED, EXIT_STOPPED)
    if failure is not None:
        return failure if failure in _DELIBERATE else EXIT_FAILED if ended_well else code
    if agents is not None:
        return agents
    if fate == TIMEOUT and progressed and (ended_well or code > 128):
        return EXIT_STOPPED
    return None if ended_well else code


def decide(end: End, before: Counts, policy: Policy) -> Outcome:
    """Return what the end of an attempt means and whether the job runs again.

    Args:
        end: of the attempt.
        before: the counts of the run without this attempt.
        policy: the rules of the run.
    """
    fixed = {EXIT_FINISHED: "finished", EXIT_CONFIG: "config", EXIT_NO_PROGRESS: "no_progress"}
    if end.code in fixed:
        return Outcome(fixed[end.code], "none", end.code)
    if end.cancelled or end.fate == CANCELLED:
        return Outcome("cancelled", "none", end.code)
    again = policy.requeue and not end.stop_asked
    # Some handlers save and then leave with an error. The newer checkpoint shows that the stop was of use.
    has_saved_and_failed = end.failed_at_stop and end.progressed
    if end.code == EXIT_STOPPED or end.fate in _BY_SLURM or has_saved_and_failed:
        return _stopped(end, before, policy, again)._replace(reason=_reason(end))
    # After 76 the next attempt gets other nodes. A run that had progressed may have met a bad node, so that
    # its first failure without progress is tried again.
    hopeful = end.progressed or before.progressed or end.code == EXIT_UNHEALTHY_NODE
    again = again and hopeful and before.failures < policy.max_restarts
    return Outcome("failed", "requeue" if again else "none", end.code)


def _reason(end: End) -> str:
    if end.stop_asked:
        return "on request"
    if end.fate == PREEMPTED:
        return "preempted"
    return "time limit" if end.fate == TIMEOUT or (end.fate == RUNNING and end.near_limit) else ""


def _stopped(end: End, before: Counts, policy: Policy, again: bool) -> Outcome:
    """Return the outcome of a stopped attempt: a run that stops without progress is given up."""
    if end.progressed:
        return Outcome("stopped", "requeue" if again else "none", end.code)
    at_limit = end.fate in (RUNNING, TIMEOUT)  # A preemption may come at any moment, and is not counted.
    idle = before.without_progress + at_limit
    stalled_at = end.latest if end.trained else None
    if again and stalled_at is not None and before.stalls.get(stalled_at, 0) + 1 >= _STALLS:
        advice = (
            f"Two attempts were stopped at {end.latest or 'step 0'} and left no newer checkpoint, so no "
            "third is made. Give the start and the save more time, then: slurmddp resume {run}"
        )
        return Outcome("no_progress", "none", EXIT_NO_PROGRESS, 0, stalled_at, advice)
    if again and at_limit and idle > policy.max_requeues_without_progress:
        advice = _advice_on_limits(idle, end.names_files)
        return Outcome("no_progress", "none", EXIT_NO_PROGRESS, idle, None, advice)
    return Outcome("stopped", "requeue" if again else "none", end.code, idle, stalled_at)


def _advice_on_limits(idle: int, names_files: bool) -> str:
    """Return what to do after `idle` time limits without a newer checkpoint, with `{run}` for the run."""
    stopped = f"The run was stopped {idle} times in a row at its time limit and left no newer checkpoint. "
    if names_files:
        return (
            stopped + "The start of its program and the work until the next save need more time: "
            "slurmddp resume {run} time_limit=... (if it has saved files, program.checkpoints does not name "
            "them)."
        )
    return (
        stopped + "Name the files that the program saves: slurmddp resume {run} program.checkpoints=PATH "
        "(or raise policy.max_requeues_without_progress)."
    )
