"""Remove the folder of a run, or a sweep and its runs, for good; needs --yes.

slurmddp rm first                          says how much would be removed, and removes nothing
slurmddp rm first --yes                    removes records, logs, checkpoints, report; not an active run
slurmddp rm first-sweep-3ff47d90 --yes     removes a sweep and its runs; active runs stay
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from slurmddp.checkpoint.files.space import size_text
from slurmddp.cli import start_run
from slurmddp.cli.messages import EXIT_INTERRUPTED, UsageError
from slurmddp.cli.refusals import refuse_active
from slurmddp.errors import EXIT_FINISHED, RunStateError, SlurmddpError, plain
from slurmddp.launchers.submit import array
from slurmddp.launchers.submit.sbatch import leftovers_of_each
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder import code_snapshot
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.runs.text_format import counted
from slurmddp.slurm import client

_NAMED = 5
"""The most files that a message names."""
_AT_ONCE = 100
"""The most runs whose locks are held together: each lock is an open file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp rm`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder; or a sweep")
    parser.add_argument("--yes", action="store_true", help="remove it; without this flag nothing is removed")


def run(args: argparse.Namespace) -> int:
    """Remove one run, or a sweep and its runs."""
    if (sweep := sweeps.find(args.run)) is None:
        for refusal in _remove([index.find(args.run)], yes=args.yes):
            raise refusal
        return EXIT_FINISHED
    if not args.yes:
        raise UsageError(
            f"The sweep {sweep.name} and its {counted(len(sweep.started), 'run')} would be removed for good; "
            "nothing was removed.",
            hint=f"Remove them with `slurmddp rm {sweep.name} --yes`.",
        )
    runs = sweep.started
    for start in range(0, len(runs), _AT_ONCE):
        for refusal in _remove(runs[start : start + _AT_ONCE], yes=True):
            print(f"slurmddp: {refusal.message}", file=sys.stderr)
    if left := sweep.started:
        raise RunStateError(
            f"{counted(len(left), 'run')} of {sweep.name} can't be removed; the others are removed.",
            hint=f"First `slurmddp cancel {sweep.name}`, then remove it again.",
        )
    for file in (sweep.file, sweep.report_file):
        file.unlink(missing_ok=True)
    print(f"{sweep.name} is removed.")
    return EXIT_FINISHED


def _remove(folders: Sequence[RunFolder], *, yes: bool) -> list[RunStateError]:
    """Remove runs while their locks are held; return why others stay. SLURM is asked once for all runs."""
    for folder in folders:
        refuse_foreign(folder.path, READ_ONLY)
    with ExitStack() as stack:
        held = {
            folder.path: stack.enter_context(start_run.hold(folder))
            for folder in sorted(folders, key=lambda folder: folder.name)  # As a sweep takes its locks.
        }
        elsewhere = {path for path, lock in held.items() if lock.fileno < 0}
        refusals = []
        for folder, found, jobs in _states(folders):
            try:
                _refuse(found, jobs, is_held_elsewhere=folder.path in elsewhere)
            except RunStateError as error:
                refusals.append(error)
            else:
                _remove_folder(folder, yes=yes)
    for runs_dir in {folder.path.parent for folder in folders}:
        array.remove_left_over(runs_dir)
    return refusals


def _states(folders: Sequence[RunFolder]) -> list[tuple[RunFolder, RunStatus, list[str]]]:
    """Return each run, its state, and its jobs that SLURM may still start though the run is over."""
    slurm = client.SlurmClient() if client.on_path() else None
    found = statuses(folders, slurm)
    readable = [RunFolder(one.path) for one in found if not _is_unreadable(one)]
    left = leftovers_of_each(readable, slurm) if slurm else [[] for _ in readable]
    jobs = {folder.path: some for folder, some in zip(readable, left, strict=True)}
    return [(folder, one, jobs.get(one.path, [])) for folder, one in zip(folders, found, strict=True)]


def _is_unreadable(found: RunStatus) -> bool:
    return found.state == "unknown" and found.job_id is None


def _refuse(found: RunStatus, jobs: Sequence[str], *, is_held_elsewhere: bool) -> None:
    """Raise an error if a run has, or may have, a job or a process."""
    if is_held_elsewhere or not _is_unreadable(found):
        refuse_active(
            found,
            unchanged="An active run can't be removed; nothing was changed.",
            hint=f"First `slurmddp cancel {found.name}`.",
        )
    if jobs:
        raise RunStateError(
            f"SLURM may still start job {', '.join(jobs)} of {found.name}; nothing was removed.",
            hint=f"First `slurmddp cancel {found.name}`.",
        )


def _remove_folder(folder: RunFolder, *, yes: bool) -> None:
    described = _described(folder)
    if not yes:
        raise UsageError(
            f"{folder.path} ({described}) would be removed for good; nothing was removed.",
            hint=f"Remove it with `slurmddp rm {folder.name} --yes`.",
        )
    # A name with a dot is no run: no command finds a folder that is being removed.
    doomed = folder.path.with_name(f".removed-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.path.rename(doomed)
    try:
        shutil.rmtree(doomed)
    except (OSError, KeyboardInterrupt) as error:
        why = plain(error) if isinstance(error, OSError) else "the removal was interrupted"
        left = SlurmddpError(
            f"{folder.name} is removed, but files are left: {why}.", hint=f"They lie in {doomed}."
        )
        left.exit_code = left.exit_code if isinstance(error, OSError) else EXIT_INTERRUPTED
        raise left from error
    print(f"{folder.name} is removed ({described}).")


def _described(folder: RunFolder) -> str:
    size = sum(path.lstat().st_size for path in folder.path.rglob("*") if not path.is_dir())
    checkpoints = len([*folder.checkpoints_dir.glob("step-*")])
    described = f"{size_text(size)}, {counted(checkpoints, 'checkpoint')}"

    # A relative path beside the script's own file leads into the snapshot.
    written = sorted(code_snapshot.written_beside(folder.code_dir))
    if written:
        more = f" and {len(written) - _NAMED} more" if len(written) > _NAMED else ""
        names = ", ".join(str(path) for path in written[:_NAMED])
        described += f", files that the run wrote into {folder.code_dir.name}/: {names}{more}"
    return described
