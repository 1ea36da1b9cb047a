"""Print whether SLURM would start a job, for `--check`; nothing is queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmddp.cli.json_output import print_json
from slurmddp.control.check import CheckedJob, check
from slurmddp.errors import EXIT_CONFIG, EXIT_FINISHED
from slurmddp.runs.text_format import counted

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job


def show(groups: Sequence[Sequence[Job]], *, as_json: bool) -> int:
    """Print for each job when SLURM would start it, or why SLURM would not start it.

    Args:
        groups: the jobs of each submission: one job, or the jobs of an array, which are checked together.
        as_json: whether to print JSON.

    Returns:
        `EXIT_CONFIG` if SLURM would not start one of the jobs, else `EXIT_FINISHED`.

    Raises:
        ConfigError: a job runs on this machine, so SLURM can't check it.
        SlurmError: SLURM does not answer.
    """
    checked = check(groups)
    if as_json:
        print_json(checked)
    else:
        for job in checked.jobs:
            _print(job)

    return EXIT_CONFIG if any(job.reasons for job in checked.jobs) else EXIT_FINISHED


def _print(job: CheckedJob) -> None:
    """Print whether SLURM would start a job or an array, the reasons against a start, and the notes."""
    for finding in job.reasons:
        print(finding)

    # Printed for refused jobs, too: if the message of sbatch is the only reason, a note names its cause.
    for note in job.notes:
        print(f"note: {note}")

    name = job.name
    if job.runs > 1:
        name = f"the array of {counted(job.runs, 'run')} from {job.name} on"
    if job.reasons:
        print(f"This SLURM would not start {name}. Nothing was queued or written.")
        return

    expected = f", {job.start}" if job.start else ""
    print(f"This SLURM would start {name}{expected}. Nothing was queued or written.")
