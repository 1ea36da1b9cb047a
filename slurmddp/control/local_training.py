"""Train a claimed run on this machine, or in the allocation of this shell, to its end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmddp.control.admission import checked_script
from slurmddp.control.events import Info, Report
from slurmddp.control.submission import ClaimedRun
from slurmddp.launchers.local import run as local
from slurmddp.launchers.local.allocation import Allocation, current
from slurmddp.runs.folder.create import prepare
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.index import remember

if TYPE_CHECKING:
    from slurmddp.runs.status.run_status import RunStatus
    from slurmddp.settings.spec import Job


@dataclass(frozen=True)
class TrainingBegins:
    """A run begins to train on this machine, or on the nodes of this shell's allocation."""

    job: Job
    allocation: Allocation | None
    """The allocation of this shell, on whose nodes the run trains; None: the run trains on this machine."""


@dataclass(frozen=True)
class TrainingRuns:
    """A run is training. Reported ten times a second, so that a progress view can read new metrics."""


@dataclass(frozen=True)
class TrainingLeft:
    """The ranks of a run have ended, or could not be started, so a progress view can close."""


@dataclass(frozen=True)
class TrainingEnded:
    """A run on this machine has ended without a failure."""

    job: Job
    exit_code: int
    status: RunStatus


def train_here(run: ClaimedRun, report: Report) -> int:
    """Train a run on this machine until it ends.

    Args:
        run: the run. Its lock is held until its agents have ended.
        report: called with each event.

    Returns:
        The exit code: 0 if the run has finished, 75 if it has saved and stopped, 130 if it was killed.

    Raises:
        SlurmddpError: the run has failed, or it can't start.
    """
    job = run.job
    folder = RunFolder(job.run_dir)
    if not run.is_new:
        prepare(job, checked_script(job, report), lambda text: report(Info(text)))

    remember(folder)

    allocation = current(os.environ)
    report(TrainingBegins(job, allocation))

    try:
        training = local.LocalRun(
            job, folder, run.lock, lambda text: report(Info(text)), allocation=allocation
        )
        training.start()
        exit_code = training.wait(lambda: report(TrainingRuns()))
    finally:
        report(TrainingLeft())

    # Imported here, because the import of matplotlib, which draws the report, is slow.
    from slurmddp.runs.report.html import with_report
    from slurmddp.runs.status.run_status import status

    report(TrainingEnded(job, exit_code, with_report(folder, status(folder, None))))
    return exit_code
