"""End runs: their jobs leave the queue, their processes end, and nothing requeues them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slurmddp.control.jobs_of_runs import cancel_jobs, with_leftovers
from slurmddp.control.selection import select_own
from slurmddp.errors import SlurmError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.runs.folder.history import History, read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.alive import is_alive, is_here
from slurmddp.runs.text_format import counted
from slurmddp.slurm.client import SlurmClient

_MARK = "cancelled by `slurmddp cancel`; `slurmddp resume` removes this\n"
_MOST_NAMED = 5
"""Jobs that a message names."""


@dataclass(frozen=True, kw_only=True)
class LocalProcess:
    """The launcher of a local run, and what became of it."""

    pid: int
    host: str | None
    """The host on which it was started; None if the run does not say."""
    outcome: Literal["stopping", "killed", "elsewhere", "hidden", "foreign"]
    """stopping: it was asked to save and stop. killed. elsewhere: on another host. hidden: it can't be
    seen from here. foreign: it belongs to another account. The last three are not signalled."""


@dataclass(frozen=True, kw_only=True)
class CancelledRun:
    """The outcome for one run that was to be cancelled."""

    name: str
    path: Path
    state: str
    """Its state before the action, as `RunStatus.state`."""
    detail: str
    """Why, in words."""
    cancelled: bool
    """Whether it is cancelled now; False if it had nothing to cancel."""
    jobs: tuple[str, ...] = ()
    """SLURM jobs that were cancelled."""
    process: LocalProcess | None = None
    """The process of a local run that had one."""


@dataclass(frozen=True)
class Cancelled:
    """The outcome for one run, or for each run of a sweep, that was to be cancelled."""

    runs: tuple[CancelledRun, ...]


def cancel(name: str, slurm: SlurmClient | None = None) -> Cancelled:
    """End a run, or the runs of a sweep, for good. SLURM is asked once for all.

    A second call kills a local run that was asked to save and stop.

    Args:
        name: name of a run or a sweep, the beginning of one, or a run's folder.
        slurm: the SLURM of the runs; None: this machine's.

    Returns:
        The outcome for each run, in the order of the sweep.

    Raises:
        RunNotFoundError: there is no such run or sweep, or there are several.
        ConfigError: another account owns a run, or a run's record can't be read. Nothing was changed.
        SlurmError: the runs are marked as cancelled, but SLURM did not cancel their jobs.
    """
    selection = select_own(name)
    slurm = slurm or SlurmClient()
    statuses = with_leftovers(selection.runs, slurm)
    active = [RunFolder(status.path) for status, has_job in statuses if has_job]
    ends = dict(zip((folder.path for folder in active), _end(active, slurm), strict=True))

    runs = []
    for status, has_job in statuses:
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
    """Mark runs as cancelled, then end their jobs and processes; return these for each run."""
    for folder in folders:
        read_history(folder)  # An unreadable record is an error before anything is changed.
    cancelled_before = [folder.is_cancelled for folder in folders]
    # The mark comes first: from now on the batch step neither requeues nor resubmits.
    for folder in folders:
        write_atomic(folder.cancelled_file, _MARK)
    histories = [read_history(folder) for folder in folders]

    processes: dict[Path, LocalProcess | None] = {}
    jobs: dict[Path, list[str]] = {folder.path: [] for folder in folders}
    of_slurm: list[tuple[RunFolder, Sequence[str]]] = []
    for folder, history, again in zip(folders, histories, cancelled_before, strict=True):
        if (history.job_id or "").startswith("local"):
            processes[folder.path] = _end_process(history, kill=again)
        else:
            of_slurm.append((folder, history.open_jobs))
    _cancel_jobs(of_slurm, slurm, jobs)

    # A resubmission that began before the mark has another job.
    late: list[tuple[RunFolder, Sequence[str]]] = []
    for folder, history in zip(folders, histories, strict=True):
        newer = [job_id for job_id in read_history(folder).open_jobs if job_id not in history.open_jobs]
        if newer:
            late.append((folder, newer))
    _cancel_jobs(late, slurm, jobs)

    for folder, history in zip(folders, histories, strict=True):
        folder.add_event("cancelled", job_id=history.job_id)
    return [(jobs[folder.path], processes.get(folder.path)) for folder in folders]


def _cancel_jobs(
    runs: Sequence[tuple[RunFolder, Sequence[str]]], slurm: SlurmClient, cancelled: dict[Path, list[str]]
) -> None:
    """Cancel the live jobs of runs, and add their ids to `cancelled`."""
    if not runs:
        return
    try:
        jobs_of_each = cancel_jobs(runs, slurm)
    except SlurmError as error:
        ids = [job_id for _, ids in runs for job_id in ids]
        raise SlurmError(
            f"{_marked(runs)} marked as cancelled and won't be requeued, but {_named(ids)} may "
            f"still be there: {error.message}",
            hint=f"Try the same command again when SLURM answers. {error.hint}".strip(),
        ) from error
    for (folder, _), ids in zip(runs, jobs_of_each, strict=True):
        cancelled[folder.path].extend(ids)


def _marked(runs: Sequence[tuple[RunFolder, Sequence[str]]]) -> str:
    name = runs[0][0].name
    if len(runs) == 1:
        return f"{name} is"
    return f"{name} and {counted(len(runs) - 1, 'other run')} are"


def _named(ids: Sequence[str]) -> str:
    if not ids:
        return "a job of it"
    listed = f"job {', '.join(ids[:_MOST_NAMED])}"
    if len(ids) > _MOST_NAMED:
        listed += f" and {counted(len(ids) - _MOST_NAMED, 'other')}"
    return listed


def _end_process(history: History, *, kill: bool) -> LocalProcess | None:
    """Signal the launcher of a local run; return None if it has ended."""
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
        # The launcher saves and stops at the first signal, and kills at a later Ctrl-C.
        os.kill(newest.pid, signal.SIGINT if kill else signal.SIGTERM)
        os.kill(newest.pid, signal.SIGCONT)  # A process that Ctrl-Z suspended handles no signal.
    except ProcessLookupError:
        return None
    except PermissionError:
        return LocalProcess(pid=newest.pid, host=host, outcome="foreign")
    return LocalProcess(pid=newest.pid, host=host, outcome="killed" if kill else "stopping")
