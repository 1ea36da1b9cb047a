"""Print whether this SLURM would start a job, for `--check`; nothing is queued."""

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
    """Print why this SLURM would not start jobs, or when it would; return the exit code.

    Args:
        groups: single jobs, and the jobs of each array. An array is checked as a whole.
        as_json: whether to print JSON.

    Raises:
        ConfigError: a job runs on this machine.
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
    what = f"the array of {counted(job.runs, 'run')} from {job.name} on" if job.runs > 1 else job.name
    for finding in job.reasons:
        print(finding)
    for note in job.notes:  # Where the words of sbatch are the only reason, a note names the setting.
        print(f"note: {note}")
    if job.reasons:
        print(f"This SLURM would not start {what}. Nothing was queued or written.")
        return

    expected = f", {job.start}" if job.start else ""
    print(f"This SLURM would start {what}{expected}. Nothing was queued or written.")
