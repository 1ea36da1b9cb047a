"""The commands of the batch step: `begin`, `watch`, `setup-failed`, `stage`, `end` and others."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from slurmddp.batch.attempt import Attempt, read_settings
from slurmddp.batch.slurm_job import SlurmJob
from slurmddp.environments.job_id import job_id
from slurmddp.environments.names import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmddp.errors import EXIT_USAGE
from slurmddp.runs.folder.layout import RunFolder

_STOPS = (signal.SIGTERM, signal.SIGUSR2)
"""The signals by which SLURM asks a job to stop."""


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command of the batch step and return its exit code.

    The modules of a command are imported only when this command runs.
    """
    command, *rest = arguments or [""]
    folder = RunFolder(environ[RUN_DIR_VARIABLE])
    if command == "event":
        from slurmddp.batch.event_command import run_command

        run_command(folder, json.load(sys.stdin))
        return 0

    settings = read_settings(folder)
    names = {settings.name, folder.path.name}
    if command == "begin":
        from slurmddp.batch.begin import begin

        # `begin` ignores SLURM's signals: the batch script then still starts the ranks, and the ranks handle
        # the signals.
        for number in _STOPS:
            signal.signal(number, _do_nothing)
        job = SlurmJob(environ, log=_log_to_stderr, names=names)
        return begin(folder, job, started_as=[*rest, ""][0])

    attempt = Attempt(folder, int(environ[ATTEMPT_VARIABLE]), settings, job_id(environ) or "", _log)
    if command == "watch":
        from slurmddp.batch.srun_watch import watch

        watch(attempt, environ)
    elif command == "setup-failed":
        from slurmddp.batch.setup_lines import warn

        warn(attempt, *rest[:3])
    elif command == "stage":
        from slurmddp.batch.staged_environment import start_agent

        start_agent(attempt)
    elif command == "end":
        return _end(attempt, SlurmJob(environ, log=_log, names=names), *[*rest, "", ""][:2])
    elif command == "first-node-lost":
        from slurmddp.batch.first_node import first_node_lost

        # When SLURM grants the requeue, it signals this process. The process ignores the signal, because it
        # must then still exclude the failed nodes from the job.
        for number in _STOPS:
            signal.signal(number, signal.SIG_IGN)
        first_node_lost(attempt, SlurmJob(environ, log=_log, names=names))
        attempt.commands.wait()
    else:
        return EXIT_USAGE

    return 0


def _end(attempt: Attempt, job: SlurmJob, code: str, terminated: str) -> int:
    """Record how an attempt ended, requeue the job if needed, and return the batch script's exit code.

    Args:
        attempt: the attempt.
        job: the job of the attempt.
        code: the exit code of srun; empty if bash could not read the setup lines.
        terminated: not empty if SLURM has sent SIGTERM to the batch script.
    """
    from slurmddp.batch.end import AttemptEnd

    end = AttemptEnd(attempt, job, terminated=bool(terminated))
    try:
        return end.conclude(int(code) if code else None)
    finally:
        attempt.commands.wait()


def _do_nothing(_number: int, _frame: object) -> None:
    """Ignore a signal. Child processes would inherit SIG_IGN, but they don't inherit this handler."""


def _log(text: str, descriptor: int = 1) -> None:
    """Write a line to a file descriptor, unbuffered; ignore a write error, such as a full disk."""
    with suppress(OSError):
        os.write(descriptor, os.fsencode(f"{text}\n") if text else b"")


def _log_to_stderr(text: str) -> None:
    """Write a log line to stderr, because the batch script evaluates the stdout of `begin` as shell code."""
    _log(text, 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
