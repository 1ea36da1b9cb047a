"""Refuse jobs that can't start: they are too large, exceed SLURM's limits, or have another run's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmddp.control.conflicting_configs import refuse_other_run
from slurmddp.control.events import Note, Report
from slurmddp.errors import SlurmError

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job


def refuse_misfits(jobs: Sequence[Job], report: Report) -> None:
    """Raise an error if one of the jobs can never start.

    Args:
        jobs: the jobs. Jobs with equal resources and cluster settings are compared with SLURM's limits once.
        report: called with a `Note` for each reason why SLURM may never start a job.

    Raises:
        ConfigError: the folder of a job holds another run, the job can't start on this machine, or SLURM
            would never start it.
        SlurmError: there is no SLURM on this machine.
    """
    for job in jobs:
        refuse_other_run(job)

    different = {repr((job.resources, job.cluster)): job for job in jobs}
    for job in different.values():
        checked_script(job, report)


def checked_script(job: Job, report: Report) -> str | None:
    """Check whether a job can start, and return its batch script; None for a job that runs on this machine.

    Args:
        job: the job.
        report: called with a `Note` for each reason why SLURM may never start the job.

    Raises:
        ConfigError: the job can't start on this machine, or SLURM would never start it.
        SlurmError: there is no SLURM on this machine.
    """
    if job.launcher != "slurm":
        refuse_misfit_here(job)
        return None

    from slurmddp.launchers.submit.fit import refuse_misfit
    from slurmddp.slurm import client
    from slurmddp.slurm.script import render

    script = render(job)
    if not client.on_path():
        raise SlurmError(
            "There is no sbatch on the PATH of this machine, so the job can't be submitted from it.",
            hint="Run the command on a login node, start a SLURM of your own with `slurmddp sandbox up`, or "
            "train on this machine with launcher=local. Nothing was written.",
        )

    for doubt in refuse_misfit(job, client.SlurmClient()):
        report(Note(doubt))

    return script


def refuse_misfit_here(job: Job) -> None:
    """Raise ConfigError if a local run is too large for this machine, or for the allocation of this shell.

    In an allocation, the run must not have more nodes than the allocation. Elsewhere, it must not have more
    ranks than `most_ranks` allows for the CPUs of this machine.
    """
    from slurmddp.host import process
    from slurmddp.launchers.local import run as local
    from slurmddp.launchers.local.allocation import current

    allocation = current(os.environ)
    if allocation is not None:
        allocation.require(job.resources.all_nodes, f"nodes={job.resources.all_nodes}")
    else:
        local.check_size(job.resources.world_size, process.usable_cpus())
