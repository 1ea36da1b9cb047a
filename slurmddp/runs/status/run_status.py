"""The status of a run, from its run folder; SLURM is asked only if the folder does not say how the run ended.

So a status needs no accounting, and a run that has ended costs no query. Unknown is never success.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmddp.errors import SlurmddpError, SlurmError, plain
from slurmddp.runs.failures.failure import Failure
from slurmddp.runs.failures.read import Restart, read_failure, read_restarts
from slurmddp.runs.folder.history import Attempt, History, how_ended, read_history, why_stopped
from slurmddp.runs.folder.late_files import is_there, names_in
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.alive import is_alive
from slurmddp.runs.status.logs import of_job_without_attempt
from slurmddp.runs.status.metrics import Latest, latest
from slurmddp.runs.status.verdict import ALL_STEPS, Verdict, decide
from slurmddp.settings.spec import is_own_trainer, total_steps
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.states import JobState


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The facts that `slurmddp status` shows; times in seconds since the epoch, None if not known."""

    name: str
    path: Path
    state: str
    """preparing, queued, starting, running, stopped, finished, failed, cancelled, lost, or unknown."""
    detail: str
    """Why, in words."""
    advice: str = ""
    stop_reason: str = ""
    """Why a stopped run stopped: on request, preempted, requeued, time limit; empty if that is not known."""
    job_id: str | None = None
    """The newest job of SLURM; of a local run a number that begins with "local"."""
    launcher: str | None = None
    """slurm or local."""
    allocation: str | None = None
    """The job of SLURM on whose nodes a local run is, such as the job of `salloc`."""
    attempts: int = 0
    """Number of attempts."""
    nodes: str | None = None
    """The nodes of the newest attempt, as SLURM writes them."""
    step: int | None = None
    """The last step that was recorded."""
    total_steps: int | None = None
    """The steps of the whole run; None if only its program knows."""
    loss: float | None = None
    """The newest training loss."""
    held_out: float | None = None
    """The newest loss on held-out data."""
    rate: float | None = None
    """The newest speed, in units of `rate_unit`."""
    rate_unit: str = "tokens/s"
    tflops: float | None = None
    """Model operations per second and rank, in units of 10^12."""
    mfu: float | None = None
    """Share of the device's largest operations per second."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest values that the program has logged under names of its own."""
    created: float | None = None
    started: float | None = None
    """Start of the newest attempt."""
    ended: float | None = None
    """End of the newest attempt."""
    before: str = ""
    """How the attempt before the newest ended, in words."""
    seen: float | None = None
    """Time of the last event or metric."""
    saved: float | None = None
    """Time of the last save."""
    saved_step: int | None = None
    """Step of the last save."""
    exit_code: int | None = None
    """Exit code of the newest attempt, if it has ended."""
    outcome: str | None = None
    """How the newest attempt ended: finished, stopped, failed and others; None if it has not."""
    failure: Failure | None = None
    """Why the newest attempt failed."""
    restarted: tuple[Restart, ...] = ()
    """The failures after which the ranks restarted in place, in any attempt."""
    log: Path | None = None
    """The log that a person should open first, or the folder of logs."""
    report: Path | None = None
    """The page of the run, if it was written."""
    active: bool = False
    """Whether a job or a process of this run exists, or may exist."""


def status(folder: RunFolder, slurm: SlurmClient | None) -> RunStatus:
    """Return the status of one run; without `slurm` only the folder counts."""
    return statuses([folder], slurm)[0]


def statuses(folders: Sequence[RunFolder], slurm: SlurmClient | None) -> list[RunStatus]:
    """Return the status of several runs, with one query to SLURM for all."""
    read = [_read(folder) for folder in folders]
    ids = [one.history.job_id for one in read if isinstance(one, _Read) and one.open_slurm_job]
    jobs, trouble = _ask(slurm, [job for job in ids if job])
    return [_judge(one, jobs, trouble) if isinstance(one, _Read) else one for one in read]


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The contents of one run folder, before SLURM is asked."""

    folder: RunFolder
    history: History
    total_steps: int | None
    records_steps: bool
    names_files: bool

    @property
    def is_local(self) -> bool:
        newest = self.history.newest
        if (self.history.job_id or "").startswith("local"):
            return True
        return newest is not None and newest.launcher == "local" and newest.job_id == self.history.job_id

    @property
    def open_slurm_job(self) -> bool:
        """Whether only SLURM knows the state of the newest job: it may run, or is being cancelled."""
        return not self.is_local and self.history.may_live


def _read(folder: RunFolder) -> _Read | RunStatus:
    try:
        config = folder.config()
        history = read_history(folder)
        records_steps = is_own_trainer(config.get("program")) or any(
            one.first_step is not None for one in history.attempts
        )
        return _Read(
            folder=folder,
            history=history,
            # A training function of a person may count no steps at all.
            total_steps=total_steps(config) if records_steps else None,
            records_steps=records_steps,
            names_files=bool((config.get("program") or {}).get("checkpoints")),
        )
    except (SlurmddpError, OSError, ValueError) as error:
        why = plain(error) if isinstance(error, OSError) else error
        detail = f"the run folder can't be read: {why}"
        return RunStatus(name=folder.name, path=folder.path, state="unknown", detail=detail, active=True)


def _ask(slurm: SlurmClient | None, ids: list[str]) -> tuple[dict[str, JobState] | None, str]:
    """Return the states of jobs in SLURM; None and the error if SLURM does not answer."""
    if slurm is None or not ids:
        return None, ""
    try:
        return slurm.jobs(ids), ""
    except SlurmError as error:
        return None, error.message


def _judge(read: _Read, jobs: dict[str, JobState] | None, trouble: str) -> RunStatus:
    verdict = _verdict(read, jobs, trouble)
    if verdict.state in ("lost", "failed", "cancelled") and read.open_slurm_job:
        # The job may have ended between reading the folder and SLURM's answer: read the folder again.
        again = _read(read.folder)
        if isinstance(again, _Read) and again.history != read.history:
            read = again
            verdict = _verdict(again, jobs, trouble) if again.history.settled else verdict
    if verdict.state in ("lost", "failed", "cancelled") and read.history.last == "submitted":
        verdict = _with_words_of_job(read.folder, verdict)
    return _compose(read, verdict)


def _with_words_of_job(folder: RunFolder, verdict: Verdict) -> Verdict:
    """Return the verdict with what the newest job has printed, if it has left without an attempt."""
    job_id, lines = of_job_without_attempt(folder)
    if not lines:
        return verdict
    state = "lost" if verdict.state == "cancelled" and not folder.is_cancelled else verdict.state
    return replace(verdict, state=state, detail=f"job {job_id} began no attempt: {lines[-1].rstrip('.')}")


def _verdict(read: _Read, jobs: dict[str, JobState] | None, trouble: str) -> Verdict:
    history = read.history
    job = jobs.get(history.job_id or "") if jobs is not None else None
    if job is not None and not job.may_be_of(read.folder.path):
        job = None
    return decide(
        history,
        run=read.folder.name,
        cancelled=read.folder.is_cancelled,
        stop=read.folder.is_stopped,
        alive=is_alive(history.newest) if read.is_local and history.may_live and history.newest else None,
        local=read.is_local,
        asked=jobs is not None,
        job=job,
        trouble=" ".join((job.error if job else trouble).rstrip(".").split()),
        records_steps=read.records_steps,
        names_files=read.names_files,
    )


def _compose(read: _Read, verdict: Verdict) -> RunStatus:
    folder, history = read.folder, read.history
    values, none = latest(folder), Attempt(number=0)
    newest, saved = history.newest or none, history.last_saved or none
    is_new = history.newest is None or values.attempt == newest.number  # Values may be of an earlier attempt.
    failure = read_failure(folder, newest.number) if verdict.state != "finished" else None
    step = _reached(history, values)
    return RunStatus(
        name=folder.name,
        path=folder.path,
        state=verdict.state,
        detail=_detail(verdict, failure, newest, step, read.total_steps),
        advice=verdict.advice,
        stop_reason=_stop_reason(folder, verdict, newest),
        active=verdict.active,
        job_id=history.job_id,
        launcher=newest.launcher,
        allocation=newest.allocation,
        attempts=len(history.attempts),
        nodes=newest.nodes,
        step=step,
        total_steps=read.total_steps,
        loss=values.loss if is_new else None,
        held_out=values.held_out,
        rate=values.rate if is_new else None,
        rate_unit=values.rate_unit,
        tflops=values.tflops if is_new else None,
        mfu=values.mfu if is_new else None,
        metrics=values.own if is_new else {},
        created=history.created,
        started=newest.started,
        ended=newest.ended,
        before=_before(folder, history),
        seen=max(filter(None, [newest.seen, values.time]), default=None),
        saved=saved.saved,
        saved_step=saved.saved_step,
        exit_code=newest.exit_code,
        outcome=newest.outcome,
        failure=failure,
        restarted=read_restarts(folder, history.attempts),
        log=_log(folder, newest, failure),
        report=folder.report_file if folder.report_file.exists() else None,
    )


def _stop_reason(folder: RunFolder, verdict: Verdict, newest: Attempt) -> str:
    if verdict.state != "stopped":
        return ""
    return why_stopped(newest) if verdict.active or not folder.is_stopped else "on request"


def _detail(
    verdict: Verdict, failure: Failure | None, newest: Attempt, step: int | None, total_steps: int | None
) -> str:
    if verdict.state == "finished":
        if total_steps is None:  # The steps of a script are not known.
            return "its program ended with exit code 0"
        is_early = step is not None and step < total_steps  # With `train.max_time`.
        return f"it ended in good order after step {step} of {total_steps}" if is_early else ALL_STEPS
    if verdict.state != "failed":
        return verdict.detail
    if failure is not None:
        return f"{verdict.detail}; {failure.short}"
    setup = newest.setup_failure
    return f"{verdict.detail}; before that, the {setup}" if setup else verdict.detail


def _before(folder: RunFolder, history: History) -> str:
    """Return how the attempt before the newest ended, with the cause of a failure."""
    if len(history.attempts) < 2:
        return ""
    one = history.attempts[-2]
    failure = read_failure(folder, one.number)
    why = ""
    if failure is not None and (one.outcome == "failed" or failure.asked_to_stop):
        why = f": {failure.short}"
    return f"attempt {one.number} ended: {how_ended(one)}{why}"


def _reached(history: History, values: Latest) -> int | None:
    """Return the step of the newest ranks, which may precede the step at which earlier ranks died.

    Before their first logged step, it is the step of the checkpoint from which they resume.
    """
    newest = history.newest
    if newest is None:
        return values.step
    since = newest.again_at or -math.inf
    own = values.step if values.attempt == newest.number and (values.time or 0.0) > since else None
    saved = newest.saved_step if (newest.saved or 0.0) > since else None
    resumed = newest.resumed_step if newest.again_at is None else newest.again_step
    known = [step for step in (own, saved, resumed) if step is not None]
    if known:
        return max(known)
    last = history.last_saved
    return values.step if values.attempt == newest.number or last is None else last.saved_step


def _log(folder: RunFolder, newest: Attempt, failure: Failure | None) -> Path | None:
    """Return the log that a person should open first."""
    logs = folder.log_dir(newest.number)
    wanted = [folder.rank_log(newest.number, 0), folder.node_log(newest.number, 0)]
    if failure is not None and failure.rank is not None:
        wanted.insert(0, folder.rank_log(newest.number, failure.rank))
    elif failure is not None and failure.node_rank is not None:
        wanted.insert(0, folder.node_log(newest.number, failure.node_rank))
    names = names_in(logs)
    files = (path for path in wanted if path.name in names and path.is_file())
    return next(files, logs if is_there(logs) else None)
