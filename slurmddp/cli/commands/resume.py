"""Resume a stopped, cancelled, lost or failed run in the same folder.

slurmddp resume first                        from its last checkpoint
slurmddp resume first time_limit=24:00:00    with another time limit
slurmddp resume first time_limit=2h --check  does this SLURM take it? Nothing is submitted
slurmddp resume first nodes=2                on 2 nodes; each optimizer step keeps its samples
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from slurmddp.cli.commands.train import add_check
from slurmddp.cli.each_run import for_each_run
from slurmddp.runs import index
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.run_status import status
from slurmddp.runs.text_format import counted
from slurmddp.slurm.client import SlurmClient

if TYPE_CHECKING:
    from slurmddp.spec import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp resume`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder; or a sweep")
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="KEY=VALUE",
        help="change of place, time limit or size: partition=high",
    )
    add_check(parser)


def run(args: argparse.Namespace) -> int:
    """Start a run, or each run of a sweep, again from its last checkpoint."""
    return for_each_run(args, _run)


def _run(args: argparse.Namespace) -> int:
    from slurmddp.cli import check_job, start_run
    from slurmddp.cli.refusals import refuse_active, refuse_finished
    from slurmddp.config.checks.nccl_variables import misspelled
    from slurmddp.config.checks.sbatch_environment import unused
    from slurmddp.config.resources import SIZE
    from slurmddp.config.resume import job_of_run
    from slurmddp.runs.folder.history import is_unanswered

    folder = index.find(args.run)
    refuse_foreign(folder.path, READ_ONLY)
    if args.check:
        return check_job.show(job_of_run(folder, args.changes))
    with start_run.hold(folder) as lock:
        found = status(folder, SlurmClient())
        if not is_unanswered(folder):  # The submission below finds the job of an unanswered one.
            if found.active and not args.changes:
                return start_run.already_active(found)
            refuse_active(
                found,
                unchanged="The changes were not applied.",
                hint=f"First `slurmddp stop {found.name}`, then resume it with the changes.",
            )
            refuse_finished(found)
        job = job_of_run(folder, args.changes)
        config = job.program.config
        for note in [*unused(config, os.environ), *misspelled(config, os.environ)]:
            print(f"slurmddp: note: {note}", file=sys.stderr)
        if any(change.lstrip("+").partition("=")[0] in SIZE for change in args.changes):
            _print_size(job)
        return start_run.start_job(job, lock)


def _print_size(job: Job) -> None:
    """Print how many samples an optimizer step has after a change of the number of ranks."""
    ranks = counted(job.resources.world_size, "rank")
    samples = job.program.config["train"]["global_batch"]
    print(f"{job.run_name} resumes with {ranks}; each optimizer step keeps its {samples} samples.")
