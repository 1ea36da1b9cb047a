"""Read the id of the job around this process, as SLURM's commands take it; standard library only."""

from __future__ import annotations

from collections.abc import Mapping


def job_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of this job for scontrol: `<array>_<task>` in a job array; None outside SLURM."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    # Commands of SLURM print 7_3 for an element of an array; its SLURM_JOB_ID is another number.
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID") or None
