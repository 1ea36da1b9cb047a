"""Train a job on this machine in a separate process, which outlives the caller."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from slurmddp.control.events import Note, Report
from slurmddp.control.start import StartedRun
from slurmddp.control.status import status_of
from slurmddp.environments.names import DETACHED_VARIABLE
from slurmddp.errors import EXIT_CODES, SlurmddpError
from slurmddp.runs.folder.code_changes import changed_since
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_end import end_of
from slurmddp.slurm import client

if TYPE_CHECKING:
    from slurmddp.runs.status.run_status import RunStatus
    from slurmddp.settings.spec import Job

_POLL_S = 0.05
"""Seconds between two checks of the run folder."""


def start_detached(job: Job, *, again: bool, report: Report) -> StartedRun:
    """Start `slurmddp train` for a job as a process in its own session, which outlives the caller.

    The call returns once the training has begun, or the process has ended without one.

    Args:
        job: the job.
        again: whether to rename the folder of an earlier run first, so that the run starts at step 0.
        report: called with a `Note` if the run is active or finished already, and its code has changed.

    Returns:
        The outcome: "training", "active" or "finished".

    Raises:
        SlurmddpError: the run did not start. The message contains the output of the process.
    """
    folder = RunFolder(job.run_dir)
    started = _start(folder, ["train", *job.overrides, *(["--again"] if again else [])])
    changed = "" if started.outcome == "training" else changed_since(folder, job)
    if changed:
        report(Note(f"{folder.name}: {changed} again=True runs the new code."))

    return started


def resume_detached(folder: RunFolder, changes: Sequence[str]) -> StartedRun:
    """Start `slurmddp resume` for a run on this machine as a process that outlives the caller.

    The call returns once the training has begun, or the process has ended without one.

    Args:
        folder: the run folder.
        changes: typed settings with new values.

    Returns:
        The outcome: "training" or "active".

    Raises:
        SlurmddpError: the run did not start. The message contains the output of the process.
    """
    return _start(folder, ["resume", str(folder.path), *changes])


def _start(folder: RunFolder, command: Sequence[str]) -> StartedRun:
    """Start a command of slurmddp that trains a run, and wait until the training has begun.

    Args:
        folder: the run folder, which may not exist yet.
        command: the words of the command, without `slurmddp`.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slurmddp", *command],
            env={**os.environ, DETACHED_VARIABLE: "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # This thread waits for the process, because a process that nobody waits for stays as a zombie.
        threading.Thread(target=process.wait, daemon=True).start()
        while process.poll() is None and not _has_begun(folder, process.pid):
            time.sleep(_POLL_S)

        if not _has_begun(folder, process.pid) and process.returncode:
            output.seek(0)
            reason = output.read().strip().removeprefix("slurmddp: error: ")
            error = SlurmddpError(f"The run did not start: {reason}")
            if process.returncode in EXIT_CODES:
                error.exit_code = process.returncode
            raise error

    status = status_of(folder)
    if _has_begun(folder, process.pid):
        return _outcome(status, "training")
    return _outcome(status, "active" if status.active else "finished")


def finish_detached(job: Job, *, again: bool, report: Report) -> StartedRun:
    """Start a job as `start_detached` does, wait for the end of its run, and return the outcome of the start.

    How the run has ended is not part of this outcome: its status shows it.
    """
    started = start_detached(job, again=again, report=report)
    has_ended = end_of(RunFolder(job.run_dir), client.SlurmClient())
    while not has_ended():
        time.sleep(_POLL_S)

    return started


def _outcome(status: RunStatus, outcome: Literal["training", "active", "finished"]) -> StartedRun:
    return StartedRun(name=status.name, path=status.path, outcome=outcome, job_id=status.job_id)


def _has_begun(folder: RunFolder, pid: int) -> bool:
    """Return whether the newest attempt of a run was started by the process `pid`."""
    newest = read_history(folder).newest if folder.config_file.is_file() else None
    return newest is not None and newest.pid == pid
