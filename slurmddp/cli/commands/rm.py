"""Remove the folder of a run, or a sweep and its runs, for good; needs --yes.

slurmddp rm first                          says how much would be removed, and removes nothing
slurmddp rm first --yes                    removes records, logs, checkpoints, report; not an active run
slurmddp rm first-sweep-3ff47d90 --yes     removes a sweep and its runs; active runs stay
"""

from __future__ import annotations

import argparse
import shutil

from slurmddp.checkpoint.files.space import size_text
from slurmddp.cli import start_run
from slurmddp.cli.each_run import for_each_run
from slurmddp.cli.messages import UsageError
from slurmddp.cli.refusals import refuse_active
from slurmddp.errors import EXIT_FINISHED, RunStateError, SlurmddpError, plain
from slurmddp.launchers.submit import array
from slurmddp.launchers.submit.sbatch import leftovers
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.text_format import counted
from slurmddp.slurm import client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp rm`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder; or a sweep")
    parser.add_argument("--yes", action="store_true", help="remove it; without this flag nothing is removed")


def run(args: argparse.Namespace) -> int:
    """Remove one run, or a sweep and its runs."""
    if (sweep := sweeps.find(args.run)) is None:
        return _run(args)
    if not args.yes:
        raise UsageError(
            f"The sweep {sweep.name} and its {counted(len(sweep.started), 'run')} would be removed for good; "
            "nothing was removed.",
            hint=f"Remove them with `slurmddp rm {sweep.name} --yes`.",
        )
    for_each_run(args, _run)
    if left := sweep.started:
        raise RunStateError(
            f"{counted(len(left), 'run')} of {sweep.name} can't be removed; the others are removed.",
            hint=f"First `slurmddp cancel {sweep.name}`, then remove it again.",
        )
    for file in (sweep.file, sweep.report_file):
        file.unlink(missing_ok=True)
    print(f"{sweep.name} is removed.")
    return EXIT_FINISHED


def _run(args: argparse.Namespace) -> int:
    folder = index.find(args.run)
    refuse_foreign(folder.path, READ_ONLY)
    with start_run.hold(folder) as lock:
        _refuse(folder, is_held_elsewhere=lock.fileno < 0)
        held = _described(folder)
        if not args.yes:
            raise UsageError(
                f"{folder.path} ({held}) would be removed for good; nothing was removed.",
                hint=f"Remove it with `slurmddp rm {folder.name} --yes`.",
            )
        # A name with a dot is no run: no command finds a folder that is being removed.
        doomed = folder.path.with_name(f".removed-{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.path.rename(doomed)
    try:
        shutil.rmtree(doomed)
    except OSError as error:
        raise SlurmddpError(
            f"{folder.name} is removed, but files are left: {plain(error)}.", hint=f"They lie in {doomed}."
        ) from error
    array.remove_left_over(folder.path.parent)
    print(f"{folder.name} is removed ({held}).")
    return EXIT_FINISHED


def _refuse(folder: RunFolder, *, is_held_elsewhere: bool) -> None:
    """Raise an error if a run has, or may have, a job or a process."""
    found = start_run.status_of(folder)
    is_unreadable = found.state == "unknown" and found.job_id is None
    if is_held_elsewhere or not is_unreadable:
        refuse_active(
            found,
            unchanged="An active run can't be removed; nothing was changed.",
            hint=f"First `slurmddp cancel {found.name}`.",
        )
    jobs = leftovers(folder, client.SlurmClient()) if client.on_path() and not is_unreadable else []
    if jobs:
        raise RunStateError(
            f"SLURM may still start job {', '.join(jobs)} of {folder.name}; nothing was removed.",
            hint=f"First `slurmddp cancel {folder.name}`.",
        )


def _described(folder: RunFolder) -> str:
    size = sum(path.lstat().st_size for path in folder.path.rglob("*") if not path.is_dir())
    checkpoints = len([*folder.checkpoints_dir.glob("step-*")])
    return f"{size_text(size)}, {counted(checkpoints, 'checkpoint')}"
