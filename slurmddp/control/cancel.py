"""Cancel runs: their jobs leave SLURM, their local processes end, and nothing requeues them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slurmddp.control.selection import select_own
from slurmddp.errors import SlurmError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.launchers.submit.queued_jobs import leftovers_of_each, live_jobs
from slurmddp.runs.folder.history import History, read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.alive import is_alive, is_here
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.runs.text_format import counted
from slurmddp.slurm.client import SlurmClient

_MARK = "cancelled by `slurmddp cancel`; `slurmddp resume` removes this file\n"
_NAMED_JOBS = 5
"""Number of jobs that a message names."""


@dataclass(frozen=True, kw_only=True)
class LocalProcess:
    """The launcher process of a cancelled local run, and whether it was stopped or killed."""

    pid: int
    host: str | None
    """The host on which the process was started; None if the run has no record of it."""
    outcome: Literal["stopping", "killed", "elsewhere", "hidden", "foreign"]
    """stopping: the process was asked to save and stop. killed: it was killed. elsewhere: it runs on another
    host. hidden: this process can't see it. foreign: another account owns it. The last three got no
    signal."""


@dataclass(frozen=True, kw_only=True)
class CancelledRun:
    """The outcome of `cancel` for one run."""

    name: str
    path: Path
    state: str
    """The state before the action, as `RunStatus.state`."""
    detail: str
    """The reason of the state, as a clause."""
    cancelled: bool
    """Whether the run was cancelled; False if it had no job and no process."""
    jobs: tuple[str, ...] = ()
    """Ids of the SLURM jobs that were cancelled."""
    process: LocalProcess | None = None
    """The process of a local run; None if the run had no process."""


@dataclass(frozen=True)
class Cancelled:
    """The outcome of `cancel` for each run of the selection."""

    runs: tuple[CancelledRun, ...]


def cancel(name: str, slurm: SlurmClient | None = None) -> Cancelled:
    """Cancel a run, or the runs of a sweep, so that nothing requeues them; one query of SLURM covers all.

    The jobs of runs on SLURM are cancelled. A local run is asked to save and stop by the first call, and is
    killed by a second call.

    Args:
        name: name of a run or a sweep, the beginning of a name, or a run folder.
        slurm: the client of the SLURM to which the runs belong; None: the SLURM of this machine.

    Returns:
        The outcome for each run, in the order of the sweep's points.

    Raises:
        RunNotFoundError: the name matches no run or sweep, or several.
        ConfigError: another account owns a run, or a run's record can't be read. Nothing was changed.
        SlurmError: the runs are marked as cancelled, but SLURM did not cancel their jobs.
    """
    selection = select_own(name)
    slurm = slurm or SlurmClient()
    selected = with_leftovers(selection.runs, slurm)
    active = [RunFolder(status.path) for status, has_job in selected if has_job]
    ends = dict(zip((folder.path for folder in active), _end(active, slurm), strict=True))

    runs = []
    for status, has_job in selected:
        jobs, process = ends.get(status.path, ((), None))
        runs.append(
            CancelledRun(
                name=status.name,
                path=status.path,
                state=status.state,
                detail=status.detail,
                cancelled=has_job,
                jobs=tuple(jobs),
                process=process,
            )
        )

    return Cancelled(tuple(runs))


def _end(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[tuple[list[str], LocalProcess | None]]:
    """Write the file `cancelled` into run folders, then cancel the jobs and signal the local processes.

    Returns:
        For each run, the ids of the cancelled jobs and the local process; None if it had no process.
    """
    for folder in folders:
        # Called for its error only: if the record of a run is unreadable, no run is changed.
        read_history(folder)

    cancelled_before = [folder.is_cancelled for folder in folders]
    # The file is written before the jobs are cancelled, because the batch step neither requeues nor resubmits
    # a run that has it.
    for folder in folders:
        write_atomic(folder.cancelled_file, _MARK)

    histories = [read_history(folder) for folder in folders]

    processes: dict[Path, LocalProcess | None] = {}
    jobs: dict[Path, list[str]] = {folder.path: [] for folder in folders}

    slurm_runs: list[tuple[RunFolder, Sequence[str]]] = []
    for folder, history, again in zip(folders, histories, cancelled_before, strict=True):
        if (history.job_id or "").startswith("local"):
            processes[folder.path] = _end_process(history, kill=again)
        else:
            slurm_runs.append((folder, history.open_jobs))

    _cancel_jobs_or_explain(slurm_runs, slurm, jobs)

    # A resubmission that began before the file `cancelled` existed may have recorded another job since.
    late: list[tuple[RunFolder, Sequence[str]]] = []
    for folder, history in zip(folders, histories, strict=True):
        newer = [job_id for job_id in read_history(folder).open_jobs if job_id not in history.open_jobs]
        if newer:
            late.append((folder, newer))

    _cancel_jobs_or_explain(late, slurm, jobs)

    for folder, history in zip(folders, histories, strict=True):
        folder.add_event("cancelled", job_id=history.job_id)

    return [(jobs[folder.path], processes.get(folder.path)) for folder in folders]


def _cancel_jobs_or_explain(
    runs: Sequence[tuple[RunFolder, Sequence[str]]], slurm: SlurmClient, cancelled: dict[Path, list[str]]
) -> None:
    """Cancel the queued and running jobs of runs, and add their ids to `cancelled` under the run's path.

    Raises:
        SlurmError: SLURM does not answer, or refuses. The message names the runs and their recorded jobs.
    """
    if not runs:
        return

    try:
        jobs_of_each = cancel_jobs(runs, slurm)
    except SlurmError as error:
        ids = [job_id for _, ids in runs for job_id in ids]
        raise SlurmError(
            f"{_subject(runs)} marked as cancelled and won't be requeued, but {_named(ids)} may "
            f"still be in SLURM: {error.message}",
            hint=f"Run the same command again when SLURM answers. {error.hint}".strip(),
        ) from error

    for (folder, _), ids in zip(runs, jobs_of_each, strict=True):
        cancelled[folder.path].extend(ids)


def with_leftovers(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[tuple[RunStatus, bool]]:
    """Return for each run its status, and whether it has, or may have, a job or a process.

    SLURM may still have a job of a run that has ended, for example a requeued one, which the run folder does
    not record. One query of SLURM finds these jobs for all runs.
    """
    all_statuses = statuses(folders, slurm)
    ended = [RunFolder(status.path) for status in all_statuses if not status.active]
    leftovers = zip(ended, leftovers_of_each(ended, slurm), strict=True)
    with_job = {folder.path for folder, jobs in leftovers if jobs}

    return [(status, status.active or status.path in with_job) for status in all_statuses]


def cancel_jobs(runs: Sequence[tuple[RunFolder, Sequence[str]]], slurm: SlurmClient) -> list[list[str]]:
    """Cancel the queued and running jobs of runs, and return their ids.

    Args:
        runs: each run, with the ids of the jobs that its folder records. Jobs that SLURM has, but the folder
            does not record, are cancelled as well.
        slurm: the client of the SLURM to which the runs belong.

    Returns:
        For each run, the ids of the cancelled jobs; empty if it had none.

    Raises:
        SlurmError: SLURM does not answer, or refuses.
    """
    named = [job_id for _, ids in runs for job_id in ids if not job_id.startswith("local")]
    known = slurm.jobs(named) if named else {}
    unrecorded = live_jobs([folder for folder, _ in runs], slurm)

    jobs_of_each: list[list[str]] = []
    for (folder, ids), live in zip(runs, unrecorded, strict=True):
        recorded = [job_id for job_id in ids if job_id in known and known[job_id].may_be_of(folder.path)]
        # squeue no longer knows a job with an `error` (see `JobState.error`), so it has ended.
        open_jobs = [job_id for job_id in recorded if not known[job_id].terminal and not known[job_id].error]
        jobs_of_each.append([*open_jobs, *(job_id for job_id in live if job_id not in open_jobs)])

    wanted = [job_id for ids in jobs_of_each for job_id in ids]
    if wanted:
        slurm.cancel(*wanted)

    return jobs_of_each


def _subject(runs: Sequence[tuple[RunFolder, Sequence[str]]]) -> str:
    """Return subject and verb of a sentence: "gpt-0a1b2c3d is" or "gpt-0a1b2c3d and 2 other runs are"."""
    name = runs[0][0].name
    if len(runs) == 1:
        return f"{name} is"
    return f"{name} and {counted(len(runs) - 1, 'other run')} are"


def _named(ids: Sequence[str]) -> str:
    """Return a phrase such as "job 7, 8 and 2 others", with at most `_NAMED_JOBS` ids."""
    if not ids:
        return "a job of it"

    listed = f"job {', '.join(ids[:_NAMED_JOBS])}"
    if len(ids) > _NAMED_JOBS:
        listed += f" and {counted(len(ids) - _NAMED_JOBS, 'other')}"

    return listed


def _end_process(history: History, *, kill: bool) -> LocalProcess | None:
    """Send a signal to the launcher of a local run.

    Args:
        history: the recorded attempts of the run.
        kill: whether the launcher must kill its ranks instead of asking them to save.

    Returns:
        The process with the outcome of the signal; None if the launcher has ended, or none was recorded.
    """
    newest = history.newest
    if newest is None or newest.pid is None:
        return None

    alive = is_alive(newest)
    host = newest.host
    if alive is None:
        outcome: Literal["elsewhere", "hidden"] = "hidden" if is_here(newest) else "elsewhere"
        return LocalProcess(pid=newest.pid, host=host, outcome=outcome)
    if not alive:
        return None

    try:
        # At its first SIGTERM or SIGINT the launcher lets the ranks save and stop; at a later SIGINT it kills
        # them.
        os.kill(newest.pid, signal.SIGINT if kill else signal.SIGTERM)
        # A launcher that Ctrl-Z has suspended would handle the signal only once a person continues it.
        os.kill(newest.pid, signal.SIGCONT)
    except ProcessLookupError:
        return None
    except PermissionError:
        return LocalProcess(pid=newest.pid, host=host, outcome="foreign")

    return LocalProcess(pid=newest.pid, host=host, outcome="killed" if kill else "stopping")
