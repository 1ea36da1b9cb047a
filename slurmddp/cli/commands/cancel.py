"""End a run: its jobs leave the queue, and it is not requeued."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.cancel import CancelledRun, LocalProcess, cancel
from slurmddp.errors import EXIT_FINISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp cancel`."""
    add_run(parser, takes_sweep=True)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Cancel one run, or the runs of a sweep; print the outcome; return the exit code."""
    result = cancel(args.run)
    if args.json:
        print_json(result)
        return EXIT_FINISHED

    for cancelled in result.runs:
        for sentence in _sentences(cancelled):
            print(sentence)

    return EXIT_FINISHED


def _sentences(run: CancelledRun) -> Iterator[str]:
    """Yield sentences that report which jobs, or which process, of a run were ended."""
    if not run.cancelled:
        yield f"{run.name} has nothing to cancel: it is {run.state} ({run.detail})."
        return

    for job_id in run.jobs:
        yield f"{run.name} is cancelled (job {job_id})."

    if run.process is not None:
        yield _of_process(run.name, run.process)
    elif not run.jobs:
        yield f"{run.name} is cancelled; it had no job in SLURM."


def _of_process(name: str, process: LocalProcess) -> str:
    """Return a sentence that reports how the process of a local run ends, or why it got no signal."""
    if process.outcome == "stopping":
        return (
            f"{name} is cancelled: process {process.pid} saves a checkpoint and stops. "
            "To kill it at once, run `slurmddp cancel` again."
        )
    if process.outcome == "killed":
        return f"{name} is cancelled: process {process.pid} ends at once."

    marked = f"{name} is marked as cancelled, but"
    if process.outcome == "elsewhere":
        return (
            f"{marked} it runs as process {process.pid} on {process.host}, not on {socket.gethostname()}. "
            f"Stop it on {process.host}, with Ctrl-C or `slurmddp cancel`."
        )
    if process.outcome == "hidden":
        return f"{marked} its process {process.pid} is not visible to this shell. Stop it with Ctrl-C."
    return f"{marked} process {process.pid} belongs to another account. Only that account or root can end it."
