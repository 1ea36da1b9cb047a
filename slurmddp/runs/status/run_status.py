"""The status of a run, from its run folder; SLURM is asked only if the folder does not record the end.

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
from slurmddp.runs.folder.history import History, RecordedAttempt, how_ended, read_history, why_stopped
from slurmddp.runs.folder.late_files import is_there, names_in
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.alive import is_alive
from slurmddp.runs.status.merged_logs import of_job_without_attempt
from slurmddp.runs.status.metrics import Latest, latest
from slurmddp.runs.status.verdict import ALL_STEPS, RunVerdict, decide
from slurmddp.settings.spec import is_own_trainer, total_steps
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.states import JobState


@dataclass(frozen=True, kw_only=True, repr=False)
class RunStatus:
    """The state of a run, for `slurmddp status`. Times are seconds since the epoch; None means unknown."""

    name: str
    path: Path
    state: str
    """preparing, queued, starting, running, stopped, finished, failed, cancelled, lost, or unknown."""
    detail: str
    """The reason for the state, in words."""
    advice: str = ""
    stop_reason: str = ""
    """Why a stopped run stopped: on request, preempted, requeued, time limit; empty if that is not known."""
    job_id: str | None = None
    """The newest SLURM job; for a local run, an id that begins with "local"."""
    launcher: str | None = None
    """slurm or local."""
    allocation: str | None = None
    """The SLURM job whose nodes a local run uses, such as the job of `salloc`."""
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
    """How the newest attempt ended, such as finished, stopped or failed; None if it has not ended."""
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

    def __repr__(self) -> str:
        """Return the main fields as text, which a notebook shows for a cell that ends with the status."""
        fields = ("name", "state", "detail", "step", "loss", "report")
        shown = ", ".join(f"{field}={getattr(self, field)!r}" for field in fields)
        return f"{type(self).__name__}({shown})"


def status(folder: RunFolder, slurm: SlurmClient | None) -> RunStatus:
    """Return the status of one run; if `slurm` is None, it is based on the run folder alone."""
    return statuses([folder], slurm)[0]


def statuses(folders: Sequence[RunFolder], slurm: SlurmClient | None) -> list[RunStatus]:
    """Return the status of each of several runs, with one query to SLURM for all of them.

    Args:
        folders: the run folders.
        slurm: the client for the query; None to use the run folders alone.
    """
    contents = [_read(folder) for folder in folders]
    readable = [content for content in contents if isinstance(content, _Content)]
    job_ids = [content.history.job_id for content in readable if content.has_open_slurm_job]
    jobs, trouble = _ask(slurm, [job_id for job_id in job_ids if job_id])

    return [
        _judge(content, jobs, trouble) if isinstance(content, _Content) else content for content in contents
    ]


@dataclass(frozen=True, kw_only=True)
class _Content:
    """The data that a run's status needs from its folder, read before the query to SLURM."""

    folder: RunFolder
    history: History
    total_steps: int | None
    records_steps: bool
    names_files: bool

    @property
    def is_local(self) -> bool:
        """Return whether the newest job was started without sbatch, by the local launcher."""
        newest = self.history.newest
        if (self.history.job_id or "").startswith("local"):
            return True
        return newest is not None and newest.launcher == "local" and newest.job_id == self.history.job_id

    @property
    def has_open_slurm_job(self) -> bool:
        """Return whether the newest job is a SLURM job that may still exist: its state must be queried."""
        return not self.is_local and self.history.may_live


def _read(folder: RunFolder) -> _Content | RunStatus:
    """Return what the status needs from a run folder; if the folder can't be read, a status `unknown`."""
    try:
        return _content_of(folder)
    except (SlurmddpError, OSError, ValueError) as error:
        reason = plain(error) if isinstance(error, OSError) else error
        return RunStatus(
            name=folder.name,
            path=folder.path,
            state="unknown",
            detail=f"the run folder can't be read: {reason}",
            active=True,
        )


def _content_of(folder: RunFolder) -> _Content:
    config = folder.config()
    history = read_history(folder)
    program = config.get("program")
    has_first_step = any(attempt.first_step is not None for attempt in history.attempts)
    records_steps = is_own_trainer(program) or has_first_step
    return _Content(
        folder=folder,
        history=history,
        # A person's own training function may count no steps, so the total would mean nothing.
        total_steps=total_steps(config) if records_steps else None,
        records_steps=records_steps,
        names_files=bool((program or {}).get("checkpoints")),
    )


def _ask(slurm: SlurmClient | None, ids: list[str]) -> tuple[dict[str, JobState] | None, str]:
    """Return the states of jobs by id, and the error of the query.

    The states are None if SLURM was not queried or did not answer. The error is empty if there was none.
    """
    if slurm is None or not ids:
        return None, ""

    try:
        return slurm.jobs(ids), ""
    except SlurmError as error:
        return None, error.message


def _judge(content: _Content, jobs: dict[str, JobState] | None, trouble: str) -> RunStatus:
    """Return the status of a run from its folder and the result of the query to SLURM (see `_ask`)."""
    verdict = _verdict(content, jobs, trouble)

    if verdict.state in ("lost", "failed", "cancelled") and content.has_open_slurm_job:
        # The job may have ended between reading the folder and SLURM's answer: read the folder again.
        content_now = _read(content.folder)
        if isinstance(content_now, _Content) and content_now.history != content.history:
            content = content_now
            if content.history.settled:
                verdict = _verdict(content, jobs, trouble)

    if verdict.state in ("lost", "failed", "cancelled") and content.history.last == "submitted":
        verdict = _with_last_line_of_job(content.folder, verdict)
    return _compose(content, verdict)


def _with_last_line_of_job(folder: RunFolder, verdict: RunVerdict) -> RunVerdict:
    """Return `verdict` with the last line of the newest job's log as the detail, if the job began no attempt.

    A job that no person cancelled then counts as lost instead of cancelled.
    """
    job_id, lines = of_job_without_attempt(folder)
    if not lines:
        return verdict

    state = verdict.state
    if state == "cancelled" and not folder.is_cancelled:
        state = "lost"
    return replace(verdict, state=state, detail=f"job {job_id} began no attempt: {lines[-1].rstrip('.')}")


def _verdict(content: _Content, jobs: dict[str, JobState] | None, trouble: str) -> RunVerdict:
    folder = content.folder
    history = content.history
    job = (jobs or {}).get(history.job_id or "")
    # A job of another run is ignored: SLURM may reuse an id.
    if job is not None and not job.may_be_of(folder.path):
        job = None
    if job is not None:
        trouble = job.error

    alive = None
    if content.is_local and history.may_live and history.newest:
        alive = is_alive(history.newest)
    return decide(
        history,
        run=folder.name,
        cancelled=folder.is_cancelled,
        stop=folder.is_stopped,
        alive=alive,
        local=content.is_local,
        asked=jobs is not None,
        job=job,
        trouble=" ".join(trouble.rstrip(".").split()),
        records_steps=content.records_steps,
        names_files=content.names_files,
    )


def _compose(content: _Content, verdict: RunVerdict) -> RunStatus:
    folder = content.folder
    history = content.history
    values = latest(folder)
    newest = history.newest or RecordedAttempt(number=0)
    saved = history.last_saved or RecordedAttempt(number=0)
    # Loss and speed are left out if an earlier attempt logged them.
    current = values
    if history.newest is not None and values.attempt != newest.number:
        current = Latest()
    failure = None
    if verdict.state != "finished":
        failure = read_failure(folder, newest.number)
    step = _reached(history, values)

    return RunStatus(
        name=folder.name,
        path=folder.path,
        state=verdict.state,
        detail=_detail(verdict, failure, newest, step, content.total_steps),
        advice=verdict.advice,
        stop_reason=_stop_reason(folder, verdict, newest),
        active=verdict.active,
        job_id=history.job_id,
        launcher=newest.launcher,
        allocation=newest.allocation,
        attempts=len(history.attempts),
        nodes=newest.nodes,
        step=step,
        total_steps=content.total_steps,
        loss=current.loss,
        held_out=values.held_out,
        rate=current.rate,
        rate_unit=values.rate_unit,
        tflops=current.tflops,
        mfu=current.mfu,
        metrics=current.own,
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


def _stop_reason(folder: RunFolder, verdict: RunVerdict, newest: RecordedAttempt) -> str:
    if verdict.state != "stopped":
        return ""
    if folder.is_stopped and not verdict.active:
        return "on request"
    return why_stopped(newest)


def _detail(
    verdict: RunVerdict,
    failure: Failure | None,
    newest: RecordedAttempt,
    step: int | None,
    total_steps: int | None,
) -> str:
    """Return the reason for the state of a run, in words; for a failed run including its failure."""
    if verdict.state == "finished":
        return _detail_of_finished(step, total_steps)
    if verdict.state != "failed":
        return verdict.detail

    if failure is not None:
        return f"{verdict.detail}; {failure.short}"
    if newest.setup_failure:
        return f"{verdict.detail}; before that, the {newest.setup_failure}"
    return verdict.detail


def _detail_of_finished(step: int | None, total_steps: int | None) -> str:
    # The number of steps of a script is not known.
    if total_steps is None:
        return "its program ended with exit code 0"
    # A run with `train.max_time` may finish before its last step.
    if step is not None and step < total_steps:
        return f"it ended in good order after step {step} of {total_steps}"
    return ALL_STEPS


def _before(folder: RunFolder, history: History) -> str:
    """Return how the second-last attempt ended, with the cause of a failure; empty if there is none."""
    if len(history.attempts) < 2:
        return ""

    attempt = history.attempts[-2]
    failure = read_failure(folder, attempt.number)
    cause = ""
    if failure is not None and (attempt.outcome == "failed" or failure.asked_to_stop):
        cause = f": {failure.short}"
    return f"attempt {attempt.number} ended: {how_ended(attempt)}{cause}"


def _reached(history: History, values: Latest) -> int | None:
    """Return the last known step of the ranks that were started last.

    The result may be lower than the last step of earlier ranks. Until these ranks log a step, it is the step
    of the checkpoint from which they resume; None if no step is known.
    """
    newest = history.newest
    if newest is None:
        return values.step

    restarted_at = newest.again_at or -math.inf
    steps = [newest.resumed_step if newest.again_at is None else newest.again_step]
    if values.attempt == newest.number and (values.time or 0.0) > restarted_at:
        steps.append(values.step)
    if (newest.saved or 0.0) > restarted_at:
        steps.append(newest.saved_step)
    known = [step for step in steps if step is not None]
    if known:
        return max(known)

    last_saved = history.last_saved
    if values.attempt == newest.number or last_saved is None:
        return values.step
    return last_saved.saved_step


def _log(folder: RunFolder, newest: RecordedAttempt, failure: Failure | None) -> Path | None:
    """Return the log that a person should open first: of the failed rank or node, else of rank 0 or node 0.

    If none of them exists, return the folder of the attempt's logs; None if this is missing, too.
    """
    logs = folder.log_dir(newest.number)
    wanted = [folder.rank_log(newest.number, 0), folder.node_log(newest.number, 0)]
    if failure is not None and failure.rank is not None:
        wanted.insert(0, folder.rank_log(newest.number, failure.rank))
    elif failure is not None and failure.node_rank is not None:
        wanted.insert(0, folder.node_log(newest.number, failure.node_rank))

    names = names_in(logs)
    files = (path for path in wanted if path.name in names and path.is_file())
    return next(files, logs if is_there(logs) else None)
