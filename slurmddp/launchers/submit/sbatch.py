"""Submission of a prepared run to SLURM, by sbatch or through submitit.

Both submitters exclude the nodes that failed lately under the account's runs, if the cluster has others.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from slurmddp.batch.slurm_job import hosts_of
from slurmddp.errors import ConfigError, RunStateError, SlurmError, near_matches
from slurmddp.launchers.submit.fit import fit_of
from slurmddp.runs.folder.excluded_nodes import adopt, excluded_nodes, shared_nodes
from slurmddp.runs.folder.history import History, read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import Job
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.options import job_name
from slurmddp.slurm.script import render
from slurmddp.slurm.states import ACTIVE, PENDING, JobState


class Submitter(Protocol):
    """Hands a prepared run folder to SLURM; the job later does the same, whichever submitter queued it."""

    def script(self, job: Job) -> str:
        """Return the text that `submit` sends, byte for byte, without writing it or asking SLURM."""

    def submit(self, job: Job) -> str:
        """Queue the prepared `job`, record it in the run folder, and return the job's id."""


class SbatchSubmitter:
    """`sbatch --parsable job.sbatch`."""

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


def build(name: str, slurm: SlurmClient | None = None) -> Submitter:
    """Return the submitter `sbatch` or `submitit`."""
    if name not in _SUBMITTERS:
        raise ConfigError(f"submitter={name!r} is not known.", hint=near_matches(name, _SUBMITTERS))
    return _SUBMITTERS[name](slurm or SlurmClient())


def _submitit(slurm: SlurmClient) -> Submitter:
    from slurmddp.launchers.submit.submitit import SubmititSubmitter

    return SubmititSubmitter(slurm)


_SUBMITTERS: dict[str, Callable[[SlurmClient], Submitter]] = {
    "sbatch": SbatchSubmitter,
    "submitit": _submitit,
}


def refuse_misfit(job: Job, slurm: SlurmClient) -> list[str]:
    """Raise ConfigError if SLURM would never start `job`; call this before `submit`.

    Returns:
        Notes on why SLURM may never start the job.
    """
    try:
        fit = fit_of(job, build(job.submitter, slurm).script(job), slurm)
    except SlurmError:
        return []  # sbatch, which runs next, gives a better reason.
    if fit.reasons:
        reasons = " ".join(map(str, fit.reasons))
        raise ConfigError(f"This SLURM would never start the job: {reasons}", hint="Nothing was queued.")
    return fit.notes


def live_jobs(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[dict[str, JobState]]:
    """Return the jobs of each run that SLURM has queued or runs, also jobs that its folder does not name."""
    found = slurm.jobs_of_each([folder.path for folder in folders])
    return [_live(found[folder.path]) for folder in folders]


def _live(found: Mapping[str, JobState]) -> dict[str, JobState]:
    live = (PENDING | ACTIVE) - {"COMPLETING"}
    return {job_id: job for job_id, job in found.items() if job.state in live}


def leftovers_of_each(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[list[str]]:
    """Return the jobs of runs that are over and that SLURM may still start; empty without an answer.

    SLURM is asked once for all runs.
    """
    try:
        found = live_jobs(folders, slurm) if folders else []
    except SlurmError:
        return [[] for _ in folders]
    return [
        [job_id for job_id, job in live.items() if job.pending or job_id not in _named(read_history(folder))]
        for folder, live in zip(folders, found, strict=True)
    ]


def settle(folder: RunFolder, slurm: SlurmClient, say: Callable[[str], None]) -> str | None:
    """Settle the jobs of one run as `settle_each` does; return the id of the adopted job, or None."""
    return settle_each([folder], slurm, say).get(folder.path)


def settle_each(
    folders: Sequence[RunFolder], slurm: SlurmClient, say: Callable[[str], None]
) -> dict[Path, str]:
    """Settle the jobs that SLURM still has of runs which are over by their folders.

    A job that SLURM has requeued is cancelled. A job that the folder does not name is adopted: its submission
    is recorded.

    Returns:
        The id of the adopted job of each run that has one, which makes another submission unnecessary.

    Raises:
        RunStateError: a job of the run still holds nodes.
        SlurmError: SLURM does not answer, so nothing is submitted.
    """
    try:
        found = slurm.jobs_of_each([folder.path for folder in folders])
    except SlurmError as error:
        raise SlurmError(f"{error.message} Nothing was submitted.", hint=error.hint) from error
    adopted = {folder.path: _settle(folder, _live(found[folder.path]), slurm, say) for folder in folders}
    return {path: job_id for path, job_id in adopted.items() if job_id is not None}


def _settle(
    folder: RunFolder, live: Mapping[str, JobState], slurm: SlurmClient, say: Callable[[str], None]
) -> str | None:
    history = read_history(folder)
    for job_id, job in live.items():
        if job_id not in _named(history):
            folder.add_event("submitted", job_id=job_id, submitter="sbatch")
            return job_id
        if job.pending:
            slurm.cancel(job_id)
            say(f"Job {job_id} of an earlier attempt was still in the queue; it was taken out.")
        elif job_id in history.open_jobs:
            raise RunStateError(
                f"Job {job_id} of {folder.name} still runs.",
                hint=f"End it with `slurmddp cancel {folder.name}`; nothing was submitted.",
            )
    return None


def _named(history: History) -> set[str | None]:
    return {history.job_id, *history.open_jobs, *(attempt.job_id for attempt in history.attempts)}


def submit(job: Job, script: Path, slurm: SlurmClient) -> str:
    """Submit `script` and return the job's id.

    The job excludes the nodes that failed lately under this or another run of the account, if SLURM has
    enough others.
    """
    known = _named(read_history(RunFolder(job.run_dir)))
    options = site_options([job], script, slurm)
    return slurm.submit(script, token=new_token(job), options=options, known=known)


def site_options(jobs: Sequence[Job], script: Path, slurm: SlurmClient) -> list[str]:
    """Return the exclusion of nodes that failed under a run as options of sbatch.

    Args:
        jobs: the jobs of the submission. Their cluster is the same.
        script: the batch script; the nodes are excluded only if SLURM then still takes it.
        slurm: the SLURM to ask.
    """
    sbatch = jobs[0].cluster.sbatch
    by_person = sbatch.get("exclude")
    options = []
    folders = [RunFolder(job.run_dir) for job in jobs if job.policy.exclude_failed_h]
    asked_for = hosts_of(str(sbatch.get("nodelist") or ""))
    failed = [node for node in _failed_nodes(folders, slurm) if node not in asked_for] if folders else []
    if failed and "/" not in str(by_person):  # With a slash it is the name of a file with nodes.
        exclude = f"--exclude={','.join([*([str(by_person)] if by_person else []), *failed])}"
        if slurm.would_take(script, [exclude]):
            options.append(exclude)
    return options


def _failed_nodes(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[str]:
    """Return the nodes to avoid; other runs' nodes are left out if SLURM does not say which cluster it is."""
    if shared_nodes():
        with suppress(SlurmError, OSError):
            cluster = slurm.cluster_name()
            for folder in folders:
                adopt(folder, cluster)
    return list(dict.fromkeys(node for folder in folders for node in excluded_nodes(folder)))


def new_token(job: Job) -> str:
    """Return a unique argument for the script of a submission, by which its job is found in the queue."""
    return f"slurmddp:{job_name(job.run_name)}:{secrets.token_hex(6)}"
