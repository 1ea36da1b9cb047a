"""Start the points of a sweep that agree in resources: one submission, in which each point is an element."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cli import start_run
from slurmddp.errors import EXIT_FINISHED, SlurmddpError
from slurmddp.host.process import OpenFiles
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.text_format import counted

if TYPE_CHECKING:
    from slurmddp.runs.folder.lock import RunLock
    from slurmddp.slurm.client import SlurmClient
    from slurmddp.spec import Job

_OTHER_FILES = 256
"""Files that a process has open beside the locks."""


def most_at_once(slurm: SlurmClient) -> int:
    """Return how many points one array may have: SLURM bounds the index, and each lock is an open file."""
    hard = OpenFiles.allow_most()
    most = slurm.max_array_size()
    return most if hard == resource.RLIM_INFINITY else min(most, hard - _OTHER_FILES)


class ArrayStart:
    """Collects the points of one array, each with the lock of its run, until `submit` submits them.

    A context manager: it releases the locks. If nothing was submitted, it removes the folders of new runs.
    """

    def __init__(self, sweep: str) -> None:
        """Collect the points of an array that is named after the sweep `sweep`."""
        self._sweep = sweep
        self._points: list[tuple[Job, RunLock, bool]] = []
        from slurmddp.runs.folder.create import Common

        self._common = Common()
        self._may_be_queued = False

    def __enter__(self) -> ArrayStart:
        return self

    def __exit__(self, *_: object) -> None:
        for job, lock, is_new in self._points:
            if is_new and not self._may_be_queued:
                start_run.remove(RunFolder(job.run_dir))
            lock.release()

    def create(self, job: Job) -> bool:
        """Create the folder of a new run; return False if it exists."""
        from slurmddp.runs.folder import create

        return create.create_element(job, self._common)

    def add(self, job: Job, lock: RunLock, *, is_new: bool = False) -> int:
        """Take a point and the lock of its run, as `start_run.start_job` does; return the exit code."""
        self._points.append((job, lock.hand_over(), is_new))
        return EXIT_FINISHED

    def submit(self, order: Sequence[str]) -> int:
        """Submit the points that SLURM does not have; return the exit code.

        Args:
            order: the names of the runs in the order of the elements.
        """
        from slurmddp.launchers.submit import array, sbatch
        from slurmddp.runs.folder.history import UNANSWERED
        from slurmddp.runs.index import remember
        from slurmddp.runs.ssh_runs import report_started
        from slurmddp.slurm import client

        if not self._points:
            return EXIT_FINISHED
        places = {name: place for place, name in enumerate(order)}
        self._points.sort(key=lambda point: places[point[0].run_name])
        slurm, folders = client.SlurmClient(), [RunFolder(job.run_dir) for job, _, _ in self._points]
        adopted = sbatch.settle_each(folders, slurm, print)
        report_started([path.name for path in adopted])
        for path, job_id in adopted.items():
            print(f"SLURM has job {job_id} of {path.name}, which its folder did not name; it is recorded.")
        jobs = [job for job, _, _ in self._points if job.run_dir not in adopted]
        new = {job.run_dir for job, _, is_new in self._points if is_new}
        if jobs:
            place = array.free_folder(jobs[0].run_dir.parent, self._sweep)
            try:
                ids = array.submit(jobs, place, slurm, new=new, common=self._common)
            except BaseException as error:
                if not isinstance(error, SlurmddpError) or getattr(error, "may_be_queued", False):
                    self._may_be_queued = True
                    for job in jobs:
                        with suppress(OSError):
                            RunFolder(job.run_dir).add_event(UNANSWERED, submitter="sbatch")
                    remember(*folders)
                raise
            report_started([job.run_name for job in jobs])
            _print(jobs, ids, place)
        self._may_be_queued = True
        remember(*folders)
        return EXIT_FINISHED


def _print(jobs: list[Job], ids: list[str], place: Path) -> None:
    first = jobs[0]
    bound = f", {first.array_parallelism} at once" if first.array_parallelism else ""
    spares = f" and {counted(first.resources.spare_nodes, 'spare')}" if first.resources.spare_nodes else ""
    where = f"{counted(first.resources.nodes, 'node')}{spares} of {first.cluster.name}"
    print(f"\narray   {ids[0].partition('_')[0]}  ({counted(len(jobs), 'job')} on {where} each{bound})")
    print(f"script  {place}/job.sbatch")
