"""Go on with a run that was stopped, cancelled or lost, or that failed, in the same folder."""

from __future__ import annotations

import argparse

from slurmddp.errors import ConfigError
from slurmddp.runs import index
from slurmddp.runs.status import RunStatus, status
from slurmddp.slurm.client import SlurmClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp resume`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder")
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="KEY=VALUE",
        help="where it runs and how long: partition=, time_limit= ...",
    )


def run(args: argparse.Namespace) -> int:
    """Submit a run again, or run it here, into its own folder: it goes on from its last checkpoint."""
    from slurmddp.cli.train import start_job
    from slurmddp.config import job_of_run

    folder = index.find(args.run)
    refuse(status(folder, SlurmClient()))
    return start_job(job_of_run(folder, args.changes))


def refuse(found: RunStatus) -> None:
    """Raise ConfigError when a second job would only get in the way of the first, or has nothing to do."""
    if found.active:
        raise ConfigError(
            f"{found.name} is {found.state}: {found.detail}.",
            hint=f"It needs no resume; to begin it anew, first `slurmddp cancel {found.name}`.",
        )
    if found.state == "finished":
        raise ConfigError(
            f"{found.name} has finished: {found.detail}.",
            hint="For more training start a new run: `slurmddp train ... train.steps=N`.",
        )
