"""Ask runs to save and stop; they stay stopped until a person resumes them.

The action writes the file `stop` into the run folder. The ranks notice the file, save, and exit with code 75.
The job of a queued run leaves the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slurmddp.control.cancel import cancel_jobs, with_leftovers
from slurmddp.control.selection import select_own
from slurmddp.errors import SlurmError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.slurm.client import SlurmClient

_MARK = "stop, by `slurmddp stop`; `slurmddp resume` removes this file\n"


@dataclass(frozen=True, kw_only=True)
class StoppedRun:
    """The outcome of `stop` for one run."""

    name: str
    path: Path
    state: str
    """The state before the action, as `RunStatus.state`."""
    detail: str
    """The reason of the state, as a clause."""
    outcome: Literal["inactive", "asked", "dequeued"]
    """inactive: the run had no job and no process. asked: its ranks were asked to stop. dequeued: its job
    held no nodes and left the queue; the run stays stopped."""
    is_script: bool = False
    """Whether the program is a script, which saves by itself, instead of slurmddp's trainer."""
    has_saved: bool = False
    """Whether an attempt of the run has saved a checkpoint."""
    jobs: tuple[str, ...] = ()
    """Ids of jobs that left the queue; if there is an `error`, they may still be in it."""
    error: str = ""
    """The reason why SLURM did not remove the jobs from the queue. Such a job ends as soon as it starts."""


@dataclass(frozen=True)
class Stopped:
    """The outcome of `stop` for each run of the selection."""

    name: str
    """Full name of the run or the sweep."""
    is_sweep: bool
    runs: tuple[StoppedRun, ...]


def stop(name: str, slurm: SlurmClient | None = None) -> Stopped:
    """Ask a run, or the runs of a sweep, to save and stop; one query of SLURM covers all.

    Jobs that wait in the queue are cancelled. The runs stay stopped until a person resumes them.

    Args:
        name: name of a run or a sweep, the beginning of a name, or a run folder.
        slurm: the client of the SLURM to which the runs belong; None: the SLURM of this machine.

    Returns:
        The outcome for each run, in the order of the sweep's points.

    Raises:
        RunNotFoundError: the name matches no run or sweep, or several.
        ConfigError: another account owns a run, or a run's record can't be read.
    """
    selection = select_own(name)
    slurm = slurm or SlurmClient()
    statuses = with_leftovers(selection.runs, slurm)
    active = [status for status, has_job in statuses if has_job and status.state != "cancelled"]
    # The file `stop` is written in all run folders before a job is cancelled: SLURM may start the next
    # element of an array in place of a cancelled one, and an element that finds the file ends at once.
    for status in active:
        write_atomic(RunFolder(status.path).stop_file, _MARK)

    waiting = [status for status in active if _holds_no_nodes(status)]
    outcomes = {run.path: run for run in _dequeue(waiting, slurm)}
    for status in active:
        if status.path not in outcomes:
            outcomes[status.path] = replace(_inactive(status), outcome="asked", is_script=_is_script(status))

    runs = [outcomes.get(status.path) or _inactive(status) for status, _ in statuses]
    return Stopped(selection.name, selection.sweep is not None, tuple(runs))


def _inactive(status: RunStatus) -> StoppedRun:
    return StoppedRun(
        name=status.name, path=status.path, state=status.state, detail=status.detail, outcome="inactive"
    )


def _is_script(status: RunStatus) -> bool:
    program = RunFolder(status.path).config().get("program") or {}
    return bool(program.get("script"))


def _holds_no_nodes(status: RunStatus) -> bool:
    """Return whether no node works for a run: it has ended, or its jobs wait in the queue."""
    return not status.active or (status.state in ("queued", "stopped") and status.launcher != "local")


def _dequeue(waiting: Sequence[RunStatus], slurm: SlurmClient) -> list[StoppedRun]:
    """Cancel the queued jobs of runs with one request.

    Returns:
        For each run, the outcome "dequeued" with its jobs; if SLURM did not answer or refused, with `error`.
    """
    if not waiting:
        return []

    folders = [RunFolder(status.path) for status in waiting]
    histories = [read_history(folder) for folder in folders]
    open_jobs = [list(history.open_jobs) for history in histories]

    message = ""
    try:
        jobs = cancel_jobs(list(zip(folders, open_jobs, strict=True)), slurm)
    except SlurmError as error:
        message = error.message
        jobs = open_jobs

    runs = []
    for status, history, ids in zip(waiting, histories, jobs, strict=True):
        has_saved = any(attempt.saved_step is not None for attempt in history.attempts)
        runs.append(
            replace(
                _inactive(status), outcome="dequeued", has_saved=has_saved, jobs=tuple(ids), error=message
            )
        )

    return runs
