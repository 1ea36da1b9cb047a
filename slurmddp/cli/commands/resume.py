"""Go on with a run that was stopped, cancelled or lost, or that failed, in the same folder."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from slurmddp.errors import ConfigError, RunStateError, SlurmError
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.run_status import RunStatus, status
from slurmddp.runs.table import counted
from slurmddp.slurm.client import SlurmClient

if TYPE_CHECKING:
    from slurmddp.spec import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp resume`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder")
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="KEY=VALUE",
        help="where it runs, how long, and on how many ranks: partition=, time_limit=, nodes= ...",
    )


def run(args: argparse.Namespace) -> int:
    """Submit a run again, or run it here, into its own folder: it resumes from its last checkpoint."""
    from slurmddp.cli.commands.train import already_active, hold, start_job
    from slurmddp.config.resume import job_of_run
    from slurmddp.config.sbatch_environment import unused
    from slurmddp.config.sizes import SIZE
    from slurmddp.runs.folder.history import is_unanswered

    folder = index.find(args.run)
    refuse_foreign(folder.path, READ_ONLY)
    with hold(folder) as lock:
        found = status(folder, SlurmClient())
        if not is_unanswered(folder):  # the submission below looks for such a job
            if found.active and not args.changes:
                return already_active(found)
            refuse(found)
        job = job_of_run(folder, args.changes)
        for note in unused(job.program.config, os.environ):
            print(f"slurmddp: note: {note}", file=sys.stderr)
        if any(change.lstrip("+").partition("=")[0] in SIZE for change in args.changes):
            _tell_size(job)
        return start_job(job, lock)


def _tell_size(job: Job) -> None:
    """Print how many samples an optimizer step has after a change of the number of ranks."""
    ranks = counted(job.resources.world_size, "rank")
    samples = job.program.config["train"]["global_batch"]
    print(f"{job.run_name} goes on with {ranks}; each optimizer step keeps its {samples} samples.")


def refuse(found: RunStatus) -> None:
    """Raise RunStateError when a run has a job, which changes nothing any more, or has nothing left to do."""
    if found.active:
        refuse_unclear(found)
        raise RunStateError(
            f"{found.name} is {found.state}: {found.detail}. The changes were not applied.",
            hint=f"First `slurmddp stop {found.name}`, then resume it with the changes.",
        )
    if found.state == "finished":
        raise RunStateError(
            f"{found.name} has finished: {found.detail}.",
            hint="For more training start a new run: `slurmddp train ... train.steps=N`.",
        )


def refuse_unclear(found: RunStatus) -> None:
    """Raise if nobody can tell whether a run is still there, or if the run has not left yet."""
    if found.state == "unknown" and found.job_id is None:
        raise ConfigError(
            f"How {found.name} stands can't be told: {found.detail}.",
            hint="Mend that file, or start the run from step 0 with `slurmddp train ... --fresh`.",
        )
    if found.state == "unknown":
        raise SlurmError(
            f"Whether job {found.job_id} of {found.name} still runs can't be seen: {found.detail}.",
            hint="Try again when SLURM answers; nothing was submitted.",
        )
    if found.active and RunFolder(found.path).stop_file.exists():
        raise RunStateError(
            f"{found.name} was asked to stop and has not left yet: {found.detail}.",
            hint=f"Try again when `slurmddp status {found.name}` says stopped; nothing was started.",
        )
    if found.state == "cancelled":
        raise RunStateError(
            f"{found.name} is cancelled: {found.detail}.",
            hint="Try again in a moment; nothing was submitted.",
        )
