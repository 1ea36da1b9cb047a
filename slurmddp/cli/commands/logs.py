"""Print the logs of a run, merged and labelled; -f follows them across restarts.

slurmddp logs                  the log of rank 0 of the newest run
slurmddp logs -f first         follow the run `first` until it ends
slurmddp logs first --rank 3   the log of rank 3
slurmddp logs first --node 1   the log of the agent of node 1, which starts and watches its ranks
"""

from __future__ import annotations

import argparse
import sys

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.logs import logs, selection
from slurmddp.errors import EXIT_FINISHED
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.follow_logs import follow
from slurmddp.runs.status.merged_logs import ChosenLogs
from slurmddp.runs.status.run_end import end_of
from slurmddp.runs.status.run_status import status
from slurmddp.slurm.client import SlurmClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp logs`."""
    add_run(parser, is_required=False)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("-f", "--follow", action="store_true", help="follow the logs until the run has ended")
    add_json(form)
    parser.add_argument(
        "-n",
        "--lines",
        type=_count,
        default=40,
        metavar="N",
        help="print the last N lines of each log, or `all` (default: 40)",
    )
    parser.add_argument(
        "--attempt", type=int, metavar="K", help="number of the attempt (default: the newest)"
    )
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        metavar="R",
        help="print the log of this rank; may be repeated (default: 0)",
    )
    parser.add_argument(
        "--node",
        type=int,
        action="append",
        metavar="N",
        help="print the log of this node's agent; may be repeated",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="print the logs of all ranks, of all agents and of the batch script",
    )


def run(args: argparse.Namespace) -> int:
    """Print the logs of one run, or follow them with `-f`; return the exit code."""
    ranks = args.rank or ()
    nodes = args.node or ()
    if args.follow and args.attempt is None:
        chosen = selection(ranks, nodes, everything=args.all)
        return _follow(index.find(args.run), chosen, args.lines)

    result = logs(
        args.run, ranks=ranks, nodes=nodes, everything=args.all, attempt=args.attempt, lines=args.lines
    )
    if args.json:
        print_json(result)
        return EXIT_FINISHED

    for line in result.lines:
        print(line)

    if result.missing:
        print(f"{result.name} has no logs yet. Its state: {result.missing}.", file=sys.stderr)

    return EXIT_FINISHED


def _follow(folder: RunFolder, chosen: ChosenLogs, count: int | None) -> int:
    """Print the last `count` lines of logs, then new lines until the run ends; return the exit code."""
    # Notes about a slow SLURM are dropped, because they would be printed between the lines of the log.
    slurm = SlurmClient(report=lambda _text: None)
    try:
        for line in follow(folder, chosen, count=count, has_ended=end_of(folder, slurm)):
            print(line, flush=True)
    except KeyboardInterrupt:
        print(
            f"\nThe run continues. `slurmddp status {folder.name}` shows its state.",
            file=sys.stderr,
        )
        return EXIT_FINISHED

    run = status(folder, slurm)
    print(f"-- {run.state}: {run.detail}")

    return EXIT_FINISHED


def _count(text: str) -> int | None:
    """Return the value of `--lines`: a number, or None for `all`."""
    if text == "all":
        return None
    if text.isdecimal():
        return int(text)

    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of lines nor `all`")
