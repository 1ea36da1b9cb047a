"""Remove the folders of runs that have no job and no process, for good."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from slurmddp.control.events import Report, ignore
from slurmddp.control.hold import hold
from slurmddp.control.run_states import refuse_active
from slurmddp.control.selection import select_own
from slurmddp.errors import EXIT_INTERRUPTED, RunStateError, SlurmddpError, plain
from slurmddp.launchers.submit import array
from slurmddp.launchers.submit.queued_jobs import leftovers_of_each
from slurmddp.runs.folder import code_snapshot
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.slurm import client

_AT_ONCE = 100
"""Number of runs whose locks are held at the same time: each lock is an open file."""


@dataclass(frozen=True, kw_only=True)
class RemovedRun:
    """A run that `remove` has removed, or would remove in a dry run, with the contents of its folder."""

    name: str
    path: Path
    size_bytes: int
    checkpoints: int
    """Number of checkpoints."""
    written: tuple[Path, ...] = ()
    """Files that the run wrote into its copy of the code, relative to the copy."""


@dataclass(frozen=True)
class KeptRun:
    """A run of a sweep that `remove` kept, because it has, or may have, a job or a process."""

    name: str
    path: Path
    reason: str
    """The reason why the run was kept, as a sentence."""


@dataclass(frozen=True)
class Removed:
    """The outcome of `remove` for each run of the selection."""

    name: str
    """Full name of the run or the sweep."""
    is_sweep: bool
    runs: tuple[RemovedRun, ...]
    kept: tuple[KeptRun, ...] = ()


def remove(name: str, *, dry_run: bool = False, report: Report = ignore) -> Removed:
    """Delete the folder of a run, or the folders of a sweep's runs and the file of the sweep.

    Args:
        name: name of a run or a sweep, the beginning of a name, or a run folder.
        dry_run: whether to remove nothing, and only return what would be removed.
        report: called with each `RemovedRun` and `KeptRun`, and with `Waiting` if another command holds the
            lock of a run.

    Returns:
        The removed and the kept runs. The file of a sweep is kept while one of its runs has a folder.

    Raises:
        RunNotFoundError: the name matches no run or sweep, or several.
        ConfigError: another account owns a run.
        RunStateError: the run has, or may have, a job or a process. In a sweep, such a run is kept instead.
        SlurmddpError: files of a run could not be removed, or Ctrl-C interrupted the removal.
    """
    selection = select_own(name)
    removed: list[RemovedRun] = []
    kept: list[KeptRun] = []
    for start in range(0, len(selection.runs), _AT_ONCE):
        batch = selection.runs[start : start + _AT_ONCE]
        with _held(batch, report) as held:
            for folder, refusal in held:
                if refusal is None:
                    run = _described(folder)
                    if not dry_run:
                        _remove_folder(folder)

                    removed.append(run)
                    report(run)
                elif selection.sweep is None:
                    raise refusal
                else:
                    kept.append(KeptRun(folder.name, folder.path, refusal.message))
                    report(kept[-1])

        for runs_dir in {folder.path.parent for folder in batch}:
            array.remove_left_over(runs_dir)

    if selection.sweep is not None and not selection.sweep.started:
        for file in (selection.sweep.file, selection.sweep.report_file):
            file.unlink(missing_ok=True)

    return Removed(selection.name, selection.sweep is not None, tuple(removed), tuple(kept))


@contextmanager
def _held(
    folders: Sequence[RunFolder], report: Report
) -> Iterator[list[tuple[RunFolder, RunStateError | None]]]:
    """Hold the locks of runs for a block, and check whether each run may be removed.

    SLURM is queried once for all runs.

    Yields:
        Each run, with the error that forbids its removal; None if the run may be removed.
    """
    with ExitStack() as stack:
        held_elsewhere = set()
        # The runs are sorted by name, as for the start of a sweep: two commands that acquire locks in the
        # same order never wait for each other.
        for folder in sorted(folders, key=lambda folder: folder.name):
            lock = stack.enter_context(hold(folder, report))
            if lock.fileno < 0:
                held_elsewhere.add(folder.path)

        yield [
            (folder, _refusal(status, jobs, is_held_elsewhere=folder.path in held_elsewhere))
            for folder, status, jobs in _states(folders)
        ]


def _states(folders: Sequence[RunFolder]) -> list[tuple[RunFolder, RunStatus, list[str]]]:
    """Return each run, its status, and the ids of jobs that SLURM may still start after the run's end."""
    slurm = client.SlurmClient() if client.on_path() else None
    all_statuses = statuses(folders, slurm)
    readable = [RunFolder(status.path) for status in all_statuses if not _is_unreadable(status)]
    leftovers = leftovers_of_each(readable, slurm) if slurm else [[] for _ in readable]
    jobs = {folder.path: ids for folder, ids in zip(readable, leftovers, strict=True)}

    return [
        (folder, status, jobs.get(status.path, []))
        for folder, status in zip(folders, all_statuses, strict=True)
    ]


def _is_unreadable(status: RunStatus) -> bool:
    return status.state == "unknown" and status.job_id is None


def _refusal(status: RunStatus, jobs: Sequence[str], *, is_held_elsewhere: bool) -> RunStateError | None:
    """Return the error for a run that has, or may have, a job or a process; None if it can be removed.

    Args:
        status: the status of the run.
        jobs: ids of jobs that SLURM may still start.
        is_held_elsewhere: whether a launcher on this machine holds the lock of the run.
    """
    try:
        if is_held_elsewhere or not _is_unreadable(status):
            refuse_active(
                status,
                unchanged="An active run can't be removed; nothing was changed.",
                hint=f"Run `slurmddp cancel {status.name}` first.",
            )
    except RunStateError as refusal:
        return refusal

    if jobs:
        return RunStateError(
            f"SLURM may still start job {', '.join(jobs)} of {status.name}; nothing was removed.",
            hint=f"Run `slurmddp cancel {status.name}` first.",
        )

    return None


def _described(folder: RunFolder) -> RemovedRun:
    """Return the size of a run folder, the number of its checkpoints, and files written into its code."""
    return RemovedRun(
        name=folder.name,
        path=folder.path,
        size_bytes=sum(path.lstat().st_size for path in folder.path.rglob("*") if not path.is_dir()),
        checkpoints=len([*folder.checkpoints_dir.glob("step-*")]),
        # The program runs in a copy of the project's code, so files that it writes beside its own script are
        # results that are removed with this copy.
        written=tuple(sorted(code_snapshot.written_by_jobs(folder.code_dir))),
    )


def _remove_folder(folder: RunFolder) -> None:
    """Remove a run folder.

    Raises:
        SlurmddpError: a file could not be removed, or Ctrl-C interrupted the removal.
    """
    # The folder is renamed before its files are removed: no run name begins with a dot, so other commands no
    # longer find the run.
    removed_path = folder.path.with_name(f".removed-{folder.name}")
    shutil.rmtree(removed_path, ignore_errors=True)
    folder.path.rename(removed_path)

    try:
        shutil.rmtree(removed_path)
    except (OSError, KeyboardInterrupt) as error:
        reason = plain(error) if isinstance(error, OSError) else "the removal was interrupted"
        failure = SlurmddpError(
            f"{folder.name} is no longer a run, but some of its files could not be removed: {reason}.",
            hint=f"Remove the folder {removed_path}.",
        )
        if isinstance(error, KeyboardInterrupt):
            failure.exit_code = EXIT_INTERRUPTED

        raise failure from error
