"""Resume an ended run in the same folder, or train a finished run further.

slurmddp resume first                        from its last checkpoint
slurmddp resume first time_limit=24:00:00    with another time limit
slurmddp resume first time_limit=2h --check  only check whether this SLURM takes the job
slurmddp resume first nodes=2                on 2 nodes; each optimizer step keeps its samples
slurmddp resume first train.steps=800        train longer, even if the run has finished
slurmddp resume first-sweep-3ff47d90         the runs of a sweep that have ended, as one job array
"""

from __future__ import annotations

import argparse

from slurmddp.cli.commands.train import add_check
from slurmddp.cli.json_output import add_json, lines_beside_json, start_and_print
from slurmddp.cli.messages import print_event
from slurmddp.cli.run_argument import add_run
from slurmddp.runs.text_format import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp resume`."""
    add_run(parser, takes_sweep=True)
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings to change, such as partition, time_limit, nodes or train.steps: partition=high",
    )
    add_check(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Resume a run, or the runs of a sweep, from their last checkpoints; with `--check`, submit nothing."""
    from slurmddp.cli.start_view import StartView
    from slurmddp.control.resume import jobs_to_resume, resume

    if not args.check:
        return start_and_print(args, lambda: resume(args.run, args.changes, report=StartView()))

    from slurmddp.cli import check_job
    from slurmddp.control.start import groups

    with lines_beside_json(args):
        selection, jobs = jobs_to_resume(args.run, args.changes, report=print_event)
        if selection.sweep is not None:
            runs = counted(len(selection.sweep.runs), "run")
            print(f"sweep   {selection.name}  ({len(jobs)} of {runs} to resume)")

    return check_job.show(groups(jobs), as_json=args.json)
