"""Submit a prepared run to SLURM by sbatch; submitit's submitter uses the same functions.

Both submitters exclude the nodes that failed in the last hours during runs of this account, if the cluster
has enough other nodes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from slurmddp.batch.slurm_job import hosts_of
from slurmddp.errors import SlurmError
from slurmddp.launchers.submit.queued_jobs import named_jobs
from slurmddp.runs.folder.excluded_nodes import adopt, excluded_nodes, shared_nodes
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import Job
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.job_script import job_name
from slurmddp.slurm.limits.queries import cluster_name
from slurmddp.slurm.script import render


class SbatchSubmitter:
    """Submits runs by `sbatch --parsable job.sbatch`."""

    def __init__(self, slurm: SlurmClient) -> None:
        self._slurm = slurm

    def script(self, job: Job) -> str:
        return render(job)

    def submit(self, job: Job) -> str:
        """Queue `job.sbatch`, record the job in the run folder and return its id."""
        folder = RunFolder(job.run_dir)
        job_id = submit(job, folder.script_file, self._slurm)
        folder.add_event("submitted", job_id=job_id, submitter="sbatch")
        return job_id


def submit(job: Job, script: Path, slurm: SlurmClient) -> str:
    """Submit `script` by sbatch, without a record in the run folder; return the job's id.

    The job excludes nodes as `site_options` does.
    """
    known = named_jobs(read_history(RunFolder(job.run_dir)))
    options = site_options([job], script, slurm)
    return slurm.submit(script, token=new_token(job), options=options, known=known)


def site_options(jobs: Sequence[Job], script: Path, slurm: SlurmClient) -> list[str]:
    """Return the options of sbatch that exclude nodes which failed lately during runs of this account.

    The result is empty if there are no such nodes, or if SLURM would refuse the job without these nodes.

    Args:
        jobs: the jobs of the submission, all on one cluster.
        script: the batch script; the nodes are excluded only if SLURM then still accepts it.
        slurm: the client of the site's SLURM.
    """
    folders = [RunFolder(job.run_dir) for job in jobs if job.policy.exclude_failed_h]
    sbatch = jobs[0].cluster.sbatch
    if not folders:
        return []

    wanted = hosts_of(str(sbatch.get("nodelist") or ""))
    failed = [node for node in _failed_nodes(folders, slurm) if node not in wanted]
    excluded = str(sbatch.get("exclude") or "")
    # `exclude` with a slash is the path of a file that lists nodes, so no node can be added to it.
    if not failed or "/" in excluded:
        return []

    option = f"--exclude={','.join(filter(None, [excluded, *failed]))}"
    return [option] if slurm.would_take(script, [option]) else []


def _failed_nodes(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[str]:
    """Return the nodes that failed lately during these runs and, if failures are shared, during other runs.

    Nodes of other runs are left out if SLURM does not name its cluster.
    """
    if shared_nodes():
        with suppress(SlurmError, OSError):
            cluster = cluster_name(slurm)
            for folder in folders:
                adopt(folder, cluster)
    return list(dict.fromkeys(node for folder in folders for node in excluded_nodes(folder)))


def new_token(job: Job) -> str:
    """Return a unique argument for the script of a submission, by which its job is found in the queue."""
    return f"slurmddp:{job_name(job.run_name)}:{secrets.token_hex(6)}"
