"""Resume an ended run in the same folder, or train a finished run further.

slurmddp resume first                        from its last checkpoint
slurmddp resume first time_limit=24:00:00    with another time limit
slurmddp resume first time_limit=2h --check  does this SLURM take it? Nothing is submitted
slurmddp resume first nodes=2                on 2 nodes; each optimizer step keeps its samples
slurmddp resume first train.steps=800        train longer, also a finished run
slurmddp resume first-sweep-3ff47d90         the runs of a sweep that have ended, as one job array
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmddp.cli.commands.train import add_check
from slurmddp.errors import EXIT_FINISHED, RunStateError, combine_exit_codes
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.run_status import RunStatus, status, statuses
from slurmddp.runs.text_format import counted
from slurmddp.slurm.client import SlurmClient

if TYPE_CHECKING:
    from slurmddp.cli.start_array import ArrayStart
    from slurmddp.spec import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp resume`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder; or a sweep")
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="KEY=VALUE",
        help="change of place, time limit, size or length: partition=high",
    )
    add_check(parser)


def run(args: argparse.Namespace) -> int:
    """Start a run, or the runs of a sweep, again from their last checkpoints."""
    from slurmddp.cli import check_job
    from slurmddp.config.resume import job_of_run

    if (sweep := sweeps.find(args.run)) is not None:
        return _resume_all(sweep, args.changes, check=args.check)
    folder = index.find(args.run)
    if not args.check:
        return _resume(folder, args.changes)
    refuse_foreign(folder.path, READ_ONLY)
    return check_job.show([[job_of_run(folder, args.changes)]])


def _resume(folder: RunFolder, changes: Sequence[str]) -> int:
    """Resume one run."""
    from slurmddp.cli import start_run
    from slurmddp.config.resume import job_of_run

    refuse_foreign(folder.path, READ_ONLY)
    with start_run.hold(folder) as lock:
        found = status(folder, SlurmClient())
        if _is_active(found, changes):
            return start_run.already_active(found)
        job = job_of_run(folder, changes)
        _print_notes([job], changes)
        return start_run.start_job(job, lock)


def _resume_all(sweep: sweeps.Sweep, changes: Sequence[str], *, check: bool) -> int:
    """Resume the runs of a sweep that are neither active nor finished, as its command starts them.

    Changes that extend finished runs resume these, too.

    With `check`, only say whether this SLURM would start them.
    """
    from slurmddp.cli import check_job, start_run, start_sweep
    from slurmddp.config.resume import job_of_run

    for folder in sweep.started:
        refuse_foreign(folder.path, READ_ONLY)
    ended = [
        RunFolder(one.path) for one in statuses(sweep.started, SlurmClient()) if _may_resume(one, changes)
    ]

    def begin(job: Job, *, array: ArrayStart | None = None) -> int:
        folder = RunFolder(job.run_dir)
        with start_run.hold(folder) as lock:
            if _may_resume(status(folder, SlurmClient()), changes):
                return array.add(job, lock) if array else start_run.start_job(job, lock)
        return EXIT_FINISHED

    jobs = [job_of_run(folder, changes) for folder in ended]
    if not check:
        start_sweep.refuse_misfits(jobs)
    print(f"sweep   {sweep.name}  ({len(jobs)} of {counted(len(sweep.runs), 'run')} to resume)")
    if check:
        return check_job.show(start_sweep.groups(jobs))
    if missing := len(sweep.runs) - len(sweep.started):
        points = counted(missing, "point")
        print(f"slurmddp: {points} without a run folder; the sweep's command starts them.", file=sys.stderr)
    _print_notes(jobs, changes)
    codes = start_sweep.start_points(jobs, begin, sweep.name)
    print(f"\n{start_sweep.ending(sweep.name)}")
    return combine_exit_codes(codes)


def _may_resume(found: RunStatus, changes: Sequence[str]) -> bool:
    """Return whether a run of a sweep can be resumed, and print why if it is left alone."""
    try:
        is_active = _is_active(found, changes)
    except RunStateError as error:
        print(f"slurmddp: {error.message}", file=sys.stderr)
        return False
    if is_active:
        print(f"{found.name} is {found.state} already: {found.detail}.")
    return not is_active


def _is_active(found: RunStatus, changes: Sequence[str]) -> bool:
    """Return whether a run has a job or process.

    Raises:
        SlurmddpError: the run has finished and is not extended, its state is not known, or it is active and
            can't be changed.
    """
    from slurmddp.control.refusals import refuse_active, refuse_finished, refuse_unclear
    from slurmddp.runs.folder.history import is_unanswered

    if is_unanswered(RunFolder(found.path)):  # The submission finds the job of an unanswered one.
        return False
    if found.active and not changes:
        refuse_unclear(found)
        return True
    refuse_active(
        found,
        unchanged="The changes were not applied.",
        hint=f"First `slurmddp stop {found.name}`, then resume it with the changes.",
    )
    refuse_finished(found, changes)
    return False


def _print_notes(jobs: Sequence[Job], changes: Sequence[str]) -> None:
    """Print notes about settings without effect, and the size of each job if the changes concern it."""
    from slurmddp.config.checks.nccl_variables import misspelled
    from slurmddp.config.checks.sbatch_environment import unused
    from slurmddp.config.resources import SIZE
    from slurmddp.config.script_arguments import key_of

    configs = [job.program.config for job in jobs]
    notes = (note for one in configs for note in (*unused(one, os.environ), *misspelled(one, os.environ)))
    for note in dict.fromkeys(notes):
        print(f"slurmddp: note: {note}", file=sys.stderr)
    if any(key_of(change) in SIZE for change in changes):
        for job in jobs:
            _print_size(job)


def _print_size(job: Job) -> None:
    """Print how many samples an optimizer step has after a change of the number of ranks."""
    ranks = counted(job.resources.world_size, "rank")
    samples = job.program.config["train"]["global_batch"]
    print(f"{job.run_name} resumes with {ranks}; each optimizer step keeps its {samples} samples.")
