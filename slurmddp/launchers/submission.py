"""What both submitters do alike: hold the job against the limits, submit without the nodes that failed."""

from __future__ import annotations

import secrets
from pathlib import Path

from slurmddp.errors import ConfigError, SlurmError
from slurmddp.runs.excluded import excluded_nodes
from slurmddp.runs.folder import RunFolder
from slurmddp.slurm.client import Slurm
from slurmddp.slurm.limits import check
from slurmddp.slurm.options import job_name
from slurmddp.spec import Job


def problems(job: Job, slurm: Slurm) -> list[str]:
    """Hold `job` against the limits that SLURM tells; none are found where it does not tell them."""
    try:
        return check(job, slurm.limits())
    except SlurmError:
        return []  # sbatch is asked next and gives its own, better, reason.


def refuse_misfit(job: Job, slurm: Slurm) -> None:
    """Raise ConfigError if SLURM would take `job` but never start it."""
    found = problems(job, slurm)
    if found:
        reasons = " ".join(found)
        raise ConfigError(f"This SLURM would never start the job: {reasons}", hint="Nothing was queued.")


def submit(job: Job, script: Path, slurm: Slurm) -> str:
    """Submit `script`, without the nodes that failed under the run where it has others; return the id."""
    comment, theirs = job.cluster.sbatch.get("comment"), job.cluster.sbatch.get("exclude")
    options = [f"--comment={comment}"] if comment else []
    failed = excluded_nodes(RunFolder(job.run_dir)) if job.policy.exclude_failed_h else []
    if failed and "/" not in str(theirs):  # with a slash it is the name of a file with nodes
        exclude = f"--exclude={','.join([*([str(theirs)] if theirs else []), *failed])}"
        if slurm.would_take(script, [exclude]):
            options.append(exclude)
    return slurm.submit(script, token=new_token(job), options=options)


def new_token(job: Job) -> str:
    """Return the word that marks one submission in SLURM's queue, so that it can be found there."""
    return f"slurmddp:{job_name(job.run_name)}:{secrets.token_hex(6)}"
