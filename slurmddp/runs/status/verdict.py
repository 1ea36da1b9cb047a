"""Decide the state of a run from its events, and from what SLURM or its process shows; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slurmddp.runs.folder.history import (
    AGAIN,
    UNANSWERED,
    History,
    RecordedAttempt,
    how_ended,
    stop_reason,
    why_stopped,
)
from slurmddp.runs.text_format import counted
from slurmddp.slurm.reasons import explain
from slurmddp.slurm.states import ACTIVE, PENDING, JobState

_RESUME = "Resume it with `slurmddp resume {run}`."
_LOGS = "See `slurmddp logs {run}`."
_LOGS_OR_RESUME = _LOGS + " " + _RESUME
_WAITS_TO_STOP = (
    "The run ends as soon as its job starts; `slurmddp stop {run}` once more takes its job out of the queue."
)
_FIX = _LOGS + " After the fix: `slurmddp resume {run}`."
_NAME_FILES = (
    "Resume it with `slurmddp resume {run} program.checkpoints=PATH`, where PATH names the files that the "
    "program saves, or raise policy.max_requeues_without_progress."
)
_MORE_TIME = (
    "Allow more time for the start of its program and the work until the next save: `slurmddp resume {run} "
    "time_limit=...`. If the program has saved files, `program.checkpoints` does not name them."
)
_FROM_THE_BEGINNING = (
    _LOGS + " If the program started from its beginning each time, let it load its newest checkpoint. Then: "
)
_WITH_FILES = "`slurmddp resume {run} program.checkpoints=PATH`, where PATH names the files that it saves."
_CORRECT = (
    _LOGS
    + " Type the command again with the right value; `slurmddp resume {run} KEY=VALUE` changes sizes and "
    "times, too."
)
ALL_STEPS = "all steps are done"
_ENDS = {
    "finished": ("finished", ALL_STEPS, ""),
    "failed": ("failed", "it failed and is not tried again", _FIX),
    "config": ("failed", "its configuration is wrong", _CORRECT),
    "no_progress": ("failed", "its last two attempts made no progress", _FIX),
    "cancelled": ("cancelled", "a person cancelled it", _RESUME),
}
_CLAUSES_OF_STOPS = {"time limit": "its time limit came, ", "preempted": "it was preempted, "}
"""The clause with which a sentence begins, by the reason of a stop that no person asked for."""

_UNANSWERED = (
    "unknown",
    "sbatch did not answer, so a job of this run may be in the queue",
    "`slurmddp resume {run}` looks for that job and submits another only if SLURM has none.",
)


@dataclass(frozen=True)
class RunVerdict:
    """A state, its reason in words, and advice for a person."""

    state: str
    detail: str
    advice: str = ""
    active: bool = False
    """Whether the job or process of the run exists, or may exist."""


_ON_REQUEST = RunVerdict("stopped", "it was stopped on request", _RESUME)


def decide(
    history: History,
    *,
    run: str,
    cancelled: bool = False,
    stop: bool = False,
    local: bool = False,
    alive: bool | None = None,
    asked: bool = False,
    job: JobState | None = None,
    trouble: str = "",
    records_steps: bool = False,
    names_files: bool = False,
) -> RunVerdict:
    """Decide the state of a run from its events, its files and its job in SLURM.

    Args:
        history: the attempts and jobs of the run, from its events.
        run: the name of the run, for the commands in the advice.
        cancelled: whether the file `cancelled` exists: a person typed `slurmddp cancel`.
        stop: whether the file `stop` exists: a person typed `slurmddp stop`.
        local: whether the local launcher, not SLURM, started the newest job.
        alive: whether the process of a local run still runs; None if this can't be found out.
        asked: whether SLURM was queried and has answered.
        job: the state of the job in SLURM; None if SLURM does not know the job.
        trouble: the error, without its final period, if SLURM did not answer; else empty.
        records_steps: whether the program records its first step. Until then, the run is `starting`.
        names_files: whether `program.checkpoints` is set.
    """
    if history.settled and history.newest is not None and history.last == "ended":
        verdict = _end(history.newest, cancelled, names_files)
        if stop and verdict.state == "stopped":
            verdict = _ON_REQUEST
    elif cancelled or history.last == "cancelled":
        if not local:
            alive = False
        verdict = _cancelled(history, job, trouble, alive=alive)
    elif history.last is None:
        advice = "If no command is at work on it, start it with `slurmddp resume {run}`."
        verdict = RunVerdict("preparing", "nothing has been submitted or started yet", advice)
    elif history.last == UNANSWERED:
        verdict = RunVerdict(*_UNANSWERED, active=True)
    elif local:
        verdict = _local(history, alive)
    elif trouble:
        detail = f"SLURM does not answer ({trouble}); by the run folder it is "
        verdict = RunVerdict("unknown", detail + _folder_only(history).state, active=True)
    elif not asked:
        verdict = _folder_only(history)
    else:
        verdict = _from_slurm(history, job, run)

    if stop and not verdict.active and not cancelled and _left_on_request(history, verdict, job):
        verdict = _ON_REQUEST
    elif records_steps and verdict.state == "running" and _is_starting(history, job):
        verdict = replace(verdict, state="starting")

    if stop and verdict.active and verdict.state in ("starting", "running"):
        verdict = replace(verdict, detail=f"{verdict.detail}, asked to stop")
    elif stop and verdict.active and verdict.state in ("queued", "stopped") and not local:
        verdict = replace(verdict, detail=f"{verdict.detail}, asked to stop", advice=_WAITS_TO_STOP)

    return replace(verdict, advice=verdict.advice.replace("{run}", run))


def _is_starting(history: History, job: JobState | None) -> bool:
    """Return whether the ranks of an open attempt have neither begun a step nor been asked to stop."""
    newest = history.newest
    if job is not None and job.state == "COMPLETING":
        return False
    return newest is not None and newest.is_open and newest.first_step is None and newest.signal is None


def _left_on_request(history: History, verdict: RunVerdict, job: JobState | None) -> bool:
    """Return whether a run that seems lost or cancelled has in fact ended because of `slurmddp stop`."""
    # The run was waiting when it was asked to stop, so its job was removed from the queue.
    if history.newest is None or history.newest.outcome == "stopped":
        return verdict.state in ("lost", "cancelled")
    # SLURM requeued the job before its attempt could record an end. The batch step of the requeued job then
    # saw the file `stop` and exited at once.
    return verdict.state == "lost" and job is not None


def _end(attempt: RecordedAttempt, cancelled: bool, names_files: bool) -> RunVerdict:
    """Return the state of a run whose last attempt has recorded its end and has no successor."""
    outcome = attempt.outcome or ""
    if cancelled and outcome != "finished":
        outcome = "cancelled"

    if outcome == "stopped":
        # The detail mentions a checkpoint only if one is recorded: a run may stop before its first one.
        has_checkpoint = attempt.saved_step is not None or attempt.resumed_step is not None
        where = " at a checkpoint" if has_checkpoint else ""
        clause = _CLAUSES_OF_STOPS.get(why_stopped(attempt), "")
        return RunVerdict("stopped", f"{clause}it stopped{where} and nothing will start it again", _RESUME)

    if outcome == "no_progress" and attempt.without_progress:
        limits = counted(attempt.without_progress, "time limit")
        detail = f"it reached {limits} in a row without saving a newer checkpoint"
        return RunVerdict("failed", detail, _MORE_TIME if names_files else _NAME_FILES)

    if outcome == "failed" and attempt.reached and attempt.first_step is None and not attempt.progressed:
        restarts = counted(len(attempt.reached), "restart")
        detail = f"it failed after {restarts} in place, and slurmddp saw no newer checkpoint of the program"
        command = "`slurmddp resume {run}`." if names_files else _WITH_FILES
        return RunVerdict("failed", detail, _FROM_THE_BEGINNING + command)

    if outcome in _ENDS:
        return RunVerdict(*_ENDS[outcome])
    detail = f"it ended with an outcome that this version does not know ({how_ended(attempt)})"
    return RunVerdict("failed", detail, _LOGS)


def _cancelled(history: History, job: JobState | None, trouble: str, *, alive: bool | None) -> RunVerdict:
    """Return the state of a run that a person has cancelled and that may still be ending."""
    newest = history.newest
    # The training had finished before `slurmddp cancel` reached it.
    if newest is not None and newest.outcome == "finished":
        return RunVerdict(*_ENDS["finished"])

    if alive is None and newest is not None and newest.is_open:
        process = f"process {newest.pid} on {newest.host}"
        detail = f"a person cancelled it; from this machine it can't be seen whether {process} has ended"
        return RunVerdict("cancelled", detail, _RESUME)
    if alive and newest is not None:
        detail = f"a person cancelled it; process {newest.pid} saves and ends"
        return RunVerdict("cancelled", detail, "`slurmddp cancel {run}` once more kills it.", active=True)

    if trouble:
        detail = f"a person cancelled it, but it is unknown whether job {history.job_id} has ended: {trouble}"
        return RunVerdict("cancelled", detail, active=True)
    if job is None or job.state not in PENDING | ACTIVE:
        return RunVerdict(*_ENDS["cancelled"])
    if history.last == "cancelled":
        detail = f"a person cancelled it; SLURM is still ending job {history.job_id}"
        return RunVerdict("cancelled", detail, active=True)
    detail = f"a person cancelled it, but `slurmddp cancel` did not reach job {history.job_id}"
    return RunVerdict("cancelled", detail, "`slurmddp cancel {run}` once more ends it.", active=True)


def _local(history: History, alive: bool | None) -> RunVerdict:
    """Return the state of a local run without a recorded end, by whether its process is alive."""
    if alive is False:
        return RunVerdict(
            "lost", "its process on this machine has ended, but recorded no end", _LOGS_OR_RESUME
        )

    newest = history.newest
    place = "locally"
    if newest is not None:
        place = f"on {newest.host or 'this machine'}"
    if newest is not None and newest.pid:
        place += f", process {newest.pid}"

    if newest is not None and not newest.is_open:
        return RunVerdict("stopped", f"between two attempts {place}", active=True)
    if not alive:
        place += "; from this machine it can't be seen whether it still runs"
    return RunVerdict("running", place, active=True)


def _folder_only(history: History) -> RunVerdict:
    """Return the state of a run according to its events, without a query to SLURM."""
    newest = history.newest
    if history.last == "started":
        return RunVerdict("running", f"job {history.job_id}, according to the run folder", active=True)
    if newest is not None:
        detail = f"attempt {newest.number} ended ({how_ended(newest)}); the run will resume"
        return RunVerdict("stopped", detail, active=True)
    return RunVerdict("queued", f"job {history.job_id} was submitted", active=True)


def _from_slurm(history: History, job: JobState | None, run: str) -> RunVerdict:
    """Return the state of a run without a recorded end, from the state of its job in SLURM.

    `job` is None if SLURM does not know the job.
    """
    if job is None and history.last != "started":
        detail = f"SLURM no longer knows job {history.job_id}, which left the queue before it started"
        return RunVerdict("cancelled", detail, _RESUME)
    if job is None:
        detail = f"SLURM no longer knows job {history.job_id}, and the run folder records no end"
        return RunVerdict("lost", detail, _LOGS_OR_RESUME)

    if job.pending:
        return _pending(history, job, run)
    if job.state in ACTIVE:
        return _running(history, job)
    if job.terminal:
        return _over(history, job)
    detail = f"SLURM gives job {history.job_id} a state that slurmddp does not know"
    return RunVerdict("unknown", detail, active=True)


def _pending(history: History, job: JobState, run: str) -> RunVerdict:
    """Return the state of a run whose job is pending in SLURM, with the reason why it waits."""
    newest = history.newest
    again = newest is not None and history.last != "submitted"
    reason, action = explain(job.reason, run=run, job_id=history.job_id or "", start=job.start, again=again)
    if newest is None:
        return RunVerdict("queued", f"job {history.job_id} waits: {reason}", action, active=True)

    if history.last == "started":
        before = f"SLURM removed attempt {newest.number} from its nodes"
    else:
        before = f"attempt {newest.number} ended ({how_ended(newest)})"
    if history.last == "submitted" and newest.next not in AGAIN:
        detail = f"{before}; now job {history.job_id} waits: {reason}"
        return RunVerdict("queued", detail, action, active=True)
    detail = f"{before}; job {history.job_id} waits to resume: {reason}"
    return RunVerdict("stopped", detail, action, active=True)


def _running(history: History, job: JobState) -> RunVerdict:
    """Return the state of a run whose job has been allocated its nodes."""
    newest = history.newest
    if history.last == "started" and newest is not None:
        phases = {
            "RUNNING": "",
            "COMPLETING": ", ending",
            "SUSPENDED": ", suspended by SLURM",
            "STOPPED": ", held by SLURM",
        }
        detail = f"job {history.job_id}{phases.get(job.state, f', {job.state.lower()}')}"
        if newest.signal:
            detail += f", stopping ({stop_reason(newest.signal)})"
        advice = ""
        if job.state == "SUSPENDED":
            advice = f"It continues when SLURM, or `scontrol resume {history.job_id}`, resumes it."
        return RunVerdict("running", detail, advice, active=True)

    if job.state == "COMPLETING" or (history.last == "ended" and newest is not None):
        return RunVerdict("stopped", f"job {history.job_id} is being requeued", active=True)
    return RunVerdict("starting", f"job {history.job_id} has its nodes", active=True)


def _over(history: History, job: JobState) -> RunVerdict:
    """Return the state of a run without a recorded end whose job has ended according to SLURM."""
    if job.state == "CANCELLED":
        return RunVerdict("cancelled", f"job {history.job_id} was cancelled in SLURM", _RESUME)
    if job.state == "COMPLETED":
        detail = f"SLURM shows job {history.job_id} as completed, but no attempt recorded its end"
        return RunVerdict("lost", detail, _LOGS_OR_RESUME)

    reasons = {
        "TIMEOUT": "it was killed at its time limit",
        "OUT_OF_MEMORY": "it ran out of memory; ask for more with `mem_gb=`",
        "NODE_FAIL": "a node failed",
        "PREEMPTED": "it was preempted, and this site does not requeue it",
        "BOOT_FAIL": "a node did not boot",
        "DEADLINE": "its deadline passed",
    }
    reason = reasons.get(job.state, f"its state in SLURM is {job.state}")
    if job.state not in reasons and job.exit_code:
        reason += f" (exit code {job.exit_code})"
    return RunVerdict("failed", f"job {history.job_id}: {reason}", _LOGS_OR_RESUME)
