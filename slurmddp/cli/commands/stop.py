"""Let a run save and stop; it stays stopped until `slurmddp resume`.

The command writes the file `stop` into the run folder; `touch RUN/stop` does the same. The run saves, ends
with exit code 75, and is not requeued. `slurmddp resume` and `slurmddp train` remove the file and resume.
The ranks of a script get SIGTERM, or SIGUSR2 if they handle SIGUSR2. The signal ends ranks that neither
handle it nor call `should_stop()`. The job of a queued run leaves the queue.
"""

from __future__ import annotations

import argparse

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.stop import StoppedRun, stop
from slurmddp.errors import EXIT_FINISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp stop`."""
    add_run(parser, takes_sweep=True)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Ask a run, or the runs of a sweep, to stop; print how each run ends."""
    result = stop(args.run)
    if args.json:
        print_json(result)
        return EXIT_FINISHED

    for stopped in result.runs:
        print(_sentence(stopped))

    if any(stopped.outcome != "inactive" for stopped in result.runs):
        command = "list" if result.is_sweep else "status"
        print(f"follow  slurmddp {command} {result.name}")
        print(f"resume  slurmddp resume {result.name}")

    return EXIT_FINISHED


def _sentence(run: StoppedRun) -> str:
    """Return a sentence that reports how a run ends after the request to stop, or why it can't stop."""
    if run.outcome == "inactive":
        return f"{run.name} has nothing to stop: it is {run.state} ({run.detail})."
    if run.outcome == "dequeued":
        return _of_queued(run)

    if run.is_script:
        consequence = "gets SIGTERM, or SIGUSR2 if it handles SIGUSR2, and is not requeued"
        note = (
            " A script that calls should_stop() or handles the signal can save first; any other script ends "
            f"at once. `slurmddp cancel {run.name}` ends it in any case."
        )
    else:
        consequence = "saves a checkpoint, ends with exit code 75 and is not requeued"
        note = ""

    if run.state == "unknown":
        return (
            f"{run.name} was asked to stop, but {run.detail}. If it is queued, it ends as soon as it starts. "
            f"If it runs, it {consequence}.{note}"
        )

    return f"{run.name} was asked to stop: within seconds it {consequence}.{note}"


def _of_queued(run: StoppedRun) -> str:
    """Return a sentence about a stopped run whose jobs were waiting in the queue."""
    saved = "has saved and " if run.has_saved else ""
    stays = f"{run.name} {saved}stays stopped"
    jobs = ", ".join(run.jobs)
    if run.error:
        return (
            f"{stays}, but job {jobs} may still be in the queue: {run.error} "
            "If SLURM starts the job, it ends at once."
        )

    return f"{stays}: job {jobs} was taken out of the queue." if jobs else f"{stays}."
