"""Submission of the rendered script as it lies in the run folder."""

from __future__ import annotations

from slurmddp.launchers.submit.submission import refuse_misfit, submit
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.client import Slurm
from slurmddp.slurm.script import render
from slurmddp.spec import Job


class SbatchSubmitter:
    """`sbatch --parsable job.sbatch`."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm

    def script(self, job: Job) -> str:
        return render(job)

    def submit(self, job: Job) -> str:
        """Queue `job.sbatch`, record the job in the run folder and return its id."""
        refuse_misfit(job, self._slurm)
        folder = RunFolder(job.run_dir)
        job_id = submit(job, folder.script_file, self._slurm)
        folder.add_event("submitted", job_id=job_id, submitter="sbatch")
        return job_id
