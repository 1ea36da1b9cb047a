"""Print the plan of a start, for `--dry-run`: the script or the commands of a job, and notes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmddp.cli.json_output import print_json
from slurmddp.control.plan import StartPlan, plan
from slurmddp.errors import EXIT_FINISHED
from slurmddp.runs.text_format import print_table

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job


def show(jobs: Sequence[Job], sweep: str | None = None, *, as_json: bool) -> int:
    """Print what the start of a job, or of the jobs of a sweep, would do; start nothing.

    Args:
        jobs: the jobs.
        sweep: name of the sweep; None for a single job.
        as_json: whether to print JSON.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: a job is too large for this machine, or two points of the sweep are the same run.
    """
    planned = plan(jobs, sweep, with_id=as_json)
    if as_json:
        print_json(planned)
    else:
        _print(planned)

    return EXIT_FINISHED


def _print(planned: StartPlan) -> None:
    """Print the points and arrays of a sweep, the script of the first run, and notes."""
    if planned.sweep is not None:
        rows = [(f"# {number}", run.name, run.settings) for number, run in enumerate(planned.runs, 1)]
        print_table(("# POINT", "RUN", "SETTINGS"), rows, sys.stdout, whole=True)
        for array in planned.arrays:
            print(f"\n{array}", end="")
        print()

    sys.stdout.write(planned.script)
    sys.stdout.flush()
    if planned.chosen_lines:
        print("slurmddp: These lines of the script come from your settings:", file=sys.stderr)
    for line in planned.chosen_lines:
        print(f"  {line}", file=sys.stderr)

    for note in planned.notes:
        print(f"slurmddp: note: {note}", file=sys.stderr)
