"""Submit claimed runs to SLURM: one run as a job, several runs as the elements of an array."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.batch.progress import latest_name
from slurmddp.control.admission import checked_script
from slurmddp.control.events import Info, Report
from slurmddp.errors import SlurmddpError
from slurmddp.launchers.submit import array, queued_jobs, submitter
from slurmddp.runs.folder.create import create, prepare
from slurmddp.runs.folder.history import UNANSWERED
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.index import remember
from slurmddp.runs.ssh_runs import report_started
from slurmddp.runs.text_format import counted
from slurmddp.settings.spec import FUNCTION_CALL, own_script
from slurmddp.slurm import client
from slurmddp.slurm.sbatch_options import note_on_cpus
from slurmddp.slurm.script import render

if TYPE_CHECKING:
    from slurmddp.runs.folder.lock import RunLock
    from slurmddp.settings.spec import Job
    from slurmddp.slurm.client import SlurmClient


@dataclass(frozen=True)
class ClaimedRun:
    """A run that this command is about to start, with its lock, so that no other command starts it."""

    job: Job
    lock: RunLock
    is_new: bool
    """Whether the run folder was created for this start, and is removed again if SLURM refuses the job."""
    renamed_earlier: Path | None = None
    """The new path of an earlier run's folder, which is moved back if SLURM refuses the job."""


@dataclass(frozen=True)
class EarlierRunRenamed:
    """The folder of an earlier run with the same name was renamed to NAME.old-N."""

    path: Path
    """The new path."""


@dataclass(frozen=True)
class SubmittedJob:
    """SLURM has queued the job of a run."""

    job: Job
    job_id: str
    notes: tuple[str, ...]
    """Remarks about the job for the person who submits it, as sentences."""


@dataclass(frozen=True)
class SubmittedArray:
    """SLURM has queued the jobs of several runs as one array."""

    jobs: tuple[Job, ...]
    job_ids: tuple[str, ...]
    folder: Path
    """The folder with the script of the array."""


@dataclass(frozen=True)
class AdoptedJob:
    """SLURM had a job of a run that its folder did not record. The job is recorded, and none is submitted."""

    run: str
    job_id: str
    is_element: bool
    """Whether the submission would have made the run an element of an array."""


class Submission:
    """A context manager that submits runs as one job or one array, and releases their locks at its end.

    If a run was not submitted, its new folder is removed at the end, and the folder of an earlier run gets
    its old name back.
    """

    def __init__(self, sweep: str, *, is_array: bool, report: Report) -> None:
        """Create a submission without runs.

        Args:
            sweep: name of the sweep, from which the name of an array is made; empty for a single run.
            is_array: whether the runs become the elements of an array.
            report: called with each event.
        """
        self._sweep = sweep
        self._is_array = is_array
        self._report = report
        self._runs: list[ClaimedRun] = []
        self._queued: set[Path] = set()
        """The folders of runs whose job SLURM has queued, or may have queued."""

    def __enter__(self) -> Submission:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            if run.is_new and run.job.run_dir not in self._queued:
                _remove(RunFolder(run.job.run_dir))
                if run.renamed_earlier is not None:
                    put_back(run.renamed_earlier, run.job.run_dir)

            run.lock.release()

    def create(self, job: Job) -> bool:
        """Create the folder of a new run; return False and change nothing if the folder exists."""
        if self._is_array:
            return create(job, render(job), with_code=False)
        return create(job, checked_script(job, self._report))

    def add(self, run: ClaimedRun) -> None:
        """Add a run to submit; the submission releases its lock."""
        self._runs.append(run)

    def submit(self, order: Sequence[str]) -> dict[str, str]:
        """Submit the added runs, except runs for which SLURM already has a job.

        Args:
            order: the names of the runs, in the order of the elements of an array.

        Returns:
            The job id of each run, by the name of the run; for a run with a job, the id of this job.

        Raises:
            SlurmddpError: a run can't be submitted, or SLURM refused. No new folder is left at the end of the
                context, unless SLURM may have queued the job (`may_be_queued` of the error).
        """
        if not self._runs:
            return {}

        places = {name: place for place, name in enumerate(order)}
        self._runs.sort(key=lambda run: places[run.job.run_name])
        slurm = client.SlurmClient()
        folders = [RunFolder(run.job.run_dir) for run in self._runs]

        # If the answer of an earlier sbatch was lost, SLURM may have the job of the run. The run adopts this
        # job instead of getting a second one.
        adopted = queued_jobs.settle_each(folders, slurm, self._report_info)
        self._queued.update(adopted)
        if adopted:
            _remember([RunFolder(path) for path in adopted])
            report_renamed([run for run in self._runs if run.job.run_dir in adopted], self._report)

        for path, job_id in adopted.items():
            self._report(AdoptedJob(path.name, job_id, self._is_array))

        runs = [run for run in self._runs if run.job.run_dir not in adopted]

        job_ids = {path.name: job_id for path, job_id in adopted.items()}
        if runs:
            job_ids |= self._submit(runs, slurm)

        return job_ids

    def _submit(self, runs: Sequence[ClaimedRun], slurm: SlurmClient) -> dict[str, str]:
        """Submit runs that have no job, and report their jobs; return the job ids by run name."""
        jobs = tuple(run.job for run in runs)
        if self._is_array:
            folder = array.free_folder(jobs[0].run_dir.parent, self._sweep)
            new = {run.job.run_dir for run in runs if run.is_new}
            with self._recorded(runs):
                ids = array.submit(jobs, folder, slurm, new=new, say=self._report_info)

            self._report(SubmittedArray(jobs, tuple(ids), folder))
            return {job.run_name: job_id for job, job_id in zip(jobs, ids, strict=True)}

        (run,) = runs
        if not run.is_new:
            prepare(run.job, checked_script(run.job, self._report), self._report_info)

        with self._recorded(runs):
            job_id = submitter.build(run.job.submitter, slurm).submit(run.job)

        self._report(SubmittedJob(run.job, job_id, notes_on(run.job)))
        return {run.job.run_name: job_id}

    @contextmanager
    def _recorded(self, runs: Sequence[ClaimedRun]) -> Iterator[None]:
        """Add runs to the index of runs after the block has submitted them, if SLURM may have their jobs.

        From the beginning of the block the runs count as queued, so that no later failure, such as a closed
        terminal, removes the folder of a queued job. If sbatch fails in such a way that SLURM has no job,
        they no longer count as queued.
        """
        folders = [RunFolder(run.job.run_dir) for run in runs]
        self._queued.update(folder.path for folder in folders)
        try:
            yield
        except BaseException as error:
            if isinstance(error, SlurmddpError) and not getattr(error, "may_be_queued", False):
                self._queued.difference_update(folder.path for folder in folders)
                raise

            for folder, run in zip(folders, runs, strict=True):
                with suppress(OSError):
                    folder.add_event(UNANSWERED, submitter=run.job.submitter)

            remember(*folders)
            report_renamed(runs, self._report)
            raise

        _remember(folders)
        report_renamed(runs, self._report)

    def _report_info(self, text: str) -> None:
        self._report(Info(text))


def report_renamed(runs: Sequence[ClaimedRun], report: Report) -> None:
    """Report `EarlierRunRenamed` for each run whose earlier folder was renamed, once the rename is final."""
    for run in runs:
        if run.renamed_earlier is not None:
            report(EarlierRunRenamed(run.renamed_earlier))


def put_back(aside: Path, place: Path) -> None:
    """Give the folder of an earlier run its old name back, unless a folder has this name.

    Args:
        aside: the present path of the folder.
        place: its old path.
    """
    with suppress(OSError):
        aside.rename(place)


def _remember(folders: Sequence[RunFolder]) -> None:
    """Add runs with a job to the index of runs, also on the laptop if they were submitted over ssh."""
    remember(*folders)
    report_started([folder.name for folder in folders])


def notes_on(job: Job) -> tuple[str, ...]:
    """Return remarks about a job, as sentences: on requeues without checkpoints, and on shared CPUs."""
    return tuple(note for note in (_note_on_progress(job), note_on_cpus(job)) if note)


def _note_on_progress(job: Job) -> str:
    """Return a remark that `program.checkpoints` may be needed; empty if it is not.

    It concerns a script that may be requeued, does not use Distributon, and has no known checkpoint: after
    some requeues without a newer checkpoint the run ends.
    """
    program = job.program.config.get("program") or {}
    may_run_again = job.policy.requeue and job.resources.time_limit_min is not None
    has_checkpoint = job.saved_files or latest_name(RunFolder(job.run_dir))
    if not program.get("script") or has_checkpoint or not may_run_again:
        return ""
    if _uses_distributon(job.project_dir / own_script(program)):
        return ""

    if program["script"] == FUNCTION_CALL:
        name = program["args"][1]
    else:
        name = own_script(program)
    limits = counted(job.policy.max_requeues_without_progress + 1, "time limit")

    return (
        f"if {name} saves checkpoints without Distributon, name them with program.checkpoints=PATH: "
        f"after {limits} without a newer checkpoint the run ends."
    )


def _uses_distributon(script: Path) -> bool:
    """Return whether a script contains the word Distributon, whose checkpoints slurmddp finds by itself."""
    try:
        return "Distributon" in script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        # A program that is a module or a command, not a file of the project, can't be searched.
        return False


def _remove(folder: RunFolder) -> None:
    """Remove the folder of a run that was not submitted, and then the folder of all runs if it is empty."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with suppress(OSError):
        folder.path.parent.rmdir()
