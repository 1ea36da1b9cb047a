"""Explain why a run waits: SLURM's reason, its place in the queue, limits, expected start."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmddp.control.contract import json_value
from slurmddp.errors import EXIT_FINISHED, SlurmddpError, SlurmError
from slurmddp.runs import index
from slurmddp.runs.status.run_status import RunStatus, status
from slurmddp.runs.text_format import paint
from slurmddp.slurm.client import SlurmClient

if TYPE_CHECKING:
    from slurmddp.runs.folder.layout import RunFolder
    from slurmddp.slurm.limits.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Wait:
    """SLURM's facts about a job that waits."""

    reason: str = ""
    """SLURM's own word."""
    start: str = ""
    """The expected start, by SLURM's clock; empty if SLURM gives none."""
    ahead: int | None = None
    """The number of waiting jobs of the partition at which SLURM looks earlier; None if not seen."""
    limits: tuple[Finding, ...] = ()
    """The limits of the site that the job exceeds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp explain`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="name, its beginning, or folder (default: the newest run)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print why a run waits, or the cause and the remedy of its end."""
    folder, slurm = index.find(args.run), SlurmClient()
    found = status(folder, slurm)
    wait = _wait(folder, found, slurm)
    if args.json:
        keys = ("name", "state", "detail", "advice", "job_id")
        facts = {key: getattr(found, key) for key in keys}
        print(json.dumps(json_value({**facts, "wait": wait}), indent=2))
        return EXIT_FINISHED
    print(paint(found.name, "bold", sys.stdout))
    for name, text in [*_lines(found), *(_of_wait(wait) if wait else [])]:
        print(f"  {paint(f'{name:<10}', 'grey', sys.stdout)} {text}")
    return EXIT_FINISHED


def _wait(folder: RunFolder, found: RunStatus, slurm: SlurmClient) -> Wait | None:
    """Return the facts of the run's job if it waits in SLURM's queue."""
    if not found.active or found.job_id is None or found.launcher == "local":
        return None
    try:
        job = slurm.jobs([found.job_id]).get(found.job_id)
        if job is None or not job.pending or not job.may_be_of(found.path):
            return None
        return Wait(
            reason=job.reason,
            start=job.start,
            ahead=slurm.jobs_ahead(found.job_id),
            limits=_limits(folder, slurm),
        )
    except SlurmError:  # The state says so.
        return None


def _limits(folder: RunFolder, slurm: SlurmClient) -> tuple[Finding, ...]:
    from slurmddp.config.resume import job_of_run
    from slurmddp.slurm.limits.site import check

    with suppress(SlurmddpError):  # A configuration of another version says nothing about the queue.
        return tuple(check(job_of_run(folder), slurm.describe().with_empty_queue()))
    return ()


def _lines(found: RunStatus) -> list[tuple[str, str]]:
    lines = [("state", f"{found.state}: {found.detail}")]
    if found.advice:
        lines.append(("next", found.advice))
    if found.failure is not None:
        lines.append(("failure", found.failure.sentence))
        lines += [("", found.failure.advice)] if found.failure.advice else []
    return lines


def _of_wait(wait: Wait) -> list[tuple[str, str]]:
    lines = [("reason", wait.reason or "none yet")]
    if wait.ahead is not None:
        waiting = "1 job waits" if wait.ahead == 1 else f"{wait.ahead or 'no'} jobs wait"
        lines.append(("queue", f"{waiting} before it in its partition"))
    lines.append(("start", f"expected at {wait.start}" if wait.start else "SLURM gives no expected start"))
    lines += [("limit", str(one)) for one in wait.limits]
    return lines
