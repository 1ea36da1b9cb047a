"""End a run: its jobs leave the queue, and it is not requeued."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.control.cancel import CancelledRun, LocalProcess, cancel
from slurmddp.errors import EXIT_FINISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp cancel`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder; or a sweep")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Cancel one run, or the runs of a sweep."""
    result = cancel(args.run)
    if args.json:
        print_json(result)
        return EXIT_FINISHED
    for cancelled in result.runs:
        for sentence in _sentences(cancelled):
            print(sentence)
    return EXIT_FINISHED


def _sentences(run: CancelledRun) -> Iterator[str]:
    """Yield what became of a run."""
    if not run.cancelled:
        yield f"{run.name} has nothing to cancel: it is {run.state} ({run.detail})."
        return
    for job_id in run.jobs:
        yield f"{run.name} is cancelled: job {job_id} was told to end."
    if run.process is not None:
        yield _of_process(run.name, run.process)
    elif not run.jobs:
        yield f"{run.name} is cancelled; no job of it was left."


def _of_process(name: str, process: LocalProcess) -> str:
    """Return what became of the process of a local run."""
    ends = {
        "stopping": "to save and stop; a second `slurmddp cancel` kills it",
        "killed": "to end at once",
    }
    if process.outcome in ends:
        return f"{name} is cancelled: process {process.pid} was told {ends[process.outcome]}."

    marked = f"{name} is marked as cancelled, but"
    if process.outcome == "elsewhere":
        return (
            f"{marked} runs as process {process.pid} on {process.host}, and this is {socket.gethostname()}: "
            "stop it there with Ctrl-C or `slurmddp cancel`."
        )
    if process.outcome == "hidden":
        return f"{marked} its process {process.pid} can't be seen from here: stop it with Ctrl-C."
    return f"{marked} process {process.pid} belongs to another account. Only that account or root can end it."
