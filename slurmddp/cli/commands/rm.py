"""Remove the folder of a run, or a sweep and its runs, for good; needs --yes.

slurmddp rm first                          print what would be removed, and remove nothing
slurmddp rm first --yes                    remove records, logs, checkpoints and report; refuse an active run
slurmddp rm first-sweep-3ff47d90 --yes     remove a sweep and its runs; keep active runs
"""

from __future__ import annotations

import argparse
import sys

from slurmddp.checkpoint.files.space import size_text
from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.messages import print_event
from slurmddp.cli.run_argument import add_run
from slurmddp.control.events import ignore
from slurmddp.control.remove import KeptRun, RemovedRun, remove
from slurmddp.control.selection import select
from slurmddp.errors import EXIT_FINISHED, RunStateError, UsageError
from slurmddp.runs.text_format import counted
from slurmddp.short_text import first_items

_NAMED = 5
"""The largest number of files that a message names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp rm`."""
    add_run(parser, takes_sweep=True)
    parser.add_argument("--yes", action="store_true", help="remove it; without this flag, nothing is removed")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Remove one run, or a sweep and its runs; return the exit code.

    Raises:
        UsageError: `--yes` is missing.
        RunStateError: some runs of a sweep can't be removed, because they are active.
    """
    if not args.yes:
        raise _unconfirmed(args.run)

    result = remove(args.run, report=ignore if args.json else _print)
    if args.json:
        print_json(result)

    if result.kept:
        raise RunStateError(
            f"{counted(len(result.kept), 'run')} of {result.name} can't be removed, because they are or may "
            "be active; the others are removed.",
            hint=f"Run `slurmddp cancel {result.name}` first, then remove it again.",
        )

    if result.is_sweep and not args.json:
        print(f"{result.name} is removed.")

    return EXIT_FINISHED


def _unconfirmed(name: str) -> UsageError:
    """Return the error about a missing `--yes`; its message describes the folders that would be removed."""
    selection = select(name)
    if selection.sweep is not None:
        return UsageError(
            f"The sweep {selection.name} and its {counted(len(selection.runs), 'run')} would be removed for "
            "good; nothing was removed.",
            hint=f"Remove them with `slurmddp rm {selection.name} --yes`.",
        )

    (removable,) = remove(name, dry_run=True, report=print_event).runs
    return UsageError(
        f"{removable.path} ({_contents(removable)}) would be removed for good; nothing was removed.",
        hint=f"Remove it with `slurmddp rm {removable.name} --yes`.",
    )


def _print(event: object) -> None:
    """Print that a run was removed, or why a run was kept."""
    if isinstance(event, RemovedRun):
        print(f"{event.name} is removed ({_contents(event)}).")
    elif isinstance(event, KeptRun):
        print(f"slurmddp: {event.reason}", file=sys.stderr)
    else:
        print_event(event)


def _contents(run: RemovedRun) -> str:
    """Return as text the size of a run folder, its checkpoints' number, and the run's own files in code/."""
    described = f"{size_text(run.size_bytes)}, {counted(run.checkpoints, 'checkpoint')}"
    if run.written:
        described += f", files that the run wrote into code/: {first_items(run.written, _NAMED)}"

    return described
