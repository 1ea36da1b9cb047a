"""Print the logs of a run, merged and labelled; -f follows them across restarts.

slurmddp logs                  rank 0 of the newest run
slurmddp logs -f first         follow a run until it ends
slurmddp logs first --rank 3   another rank
slurmddp logs first --node 1   the agent of a node, which starts and watches the ranks there
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slurmddp.errors import ConfigError
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status import logs
from slurmddp.runs.status.run_end import end_of
from slurmddp.runs.status.run_status import status
from slurmddp.slurm.client import SlurmClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp logs`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="name, its beginning, or folder (default: the newest run)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="follow the logs until the run has ended")
    parser.add_argument(
        "-n",
        "--lines",
        type=_count,
        default=40,
        metavar="N",
        help="number of last lines of each log, or `all` (default: 40)",
    )
    parser.add_argument(
        "--attempt", type=int, metavar="K", help="number of the attempt (default: the newest)"
    )
    parser.add_argument(
        "--rank", type=int, action="append", metavar="R", help="rank; may be repeated (default: 0)"
    )
    parser.add_argument(
        "--node", type=int, action="append", metavar="N", help="agent of this node; may be repeated"
    )
    parser.add_argument(
        "--all", action="store_true", help="logs of all ranks and nodes, and of the batch script"
    )


def run(args: argparse.Namespace) -> int:
    """Print the logs of one run."""
    folder = index.find(args.run)
    ranks = args.rank or ([] if args.node else [0])
    selection = logs.Selection(frozenset(ranks), frozenset(args.node or ()), everything=args.all)
    if args.follow and args.attempt is None:
        return _follow(folder, selection, args.lines)
    attempts = folder.attempts()
    unbegun = [] if attempts else [*logs.job_lines(folder, args.lines)]
    for line in unbegun:
        print(line)
    if not attempts and not unbegun:
        found = status(folder, SlurmClient())
        print(f"{folder.name} has no logs yet. It is {found.state}: {found.detail}.", file=sys.stderr)
    if not attempts:
        return 0
    attempt = _attempt(args.attempt, attempts)
    _check("rank", args.rank or [], folder, attempt)
    _check("node", args.node or [], folder, attempt)
    for line in logs.snapshot(folder, attempt, selection, args.lines):
        print(line)
    return 0


def _follow(folder: RunFolder, selection: logs.Selection, count: int | None) -> int:
    slurm = SlurmClient(say=lambda _text: None)  # A notice of a slow answer would stand among the lines.
    try:
        for line in logs.follow(folder, selection, count=count, has_ended=end_of(folder, slurm)):
            print(line, flush=True)
    except KeyboardInterrupt:
        print(
            f"\nThe run is not affected. `slurmddp status {folder.name}` shows how it stands.",
            file=sys.stderr,
        )
        return 0
    found = status(folder, slurm)
    print(f"-- {found.state}: {found.detail}")
    return 0


def _count(text: str) -> int | None:
    if text == "all":
        return None
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of lines nor `all`")


def _attempt(wanted: int | None, attempts: list[int]) -> int:
    if wanted is None:
        return attempts[-1]
    if wanted in attempts:
        return wanted
    known = ", ".join(map(str, attempts))
    raise ConfigError(f"There is no attempt {wanted}.", hint=f"The attempts of this run: {known}.")


def _check(kind: str, numbers: Sequence[int], folder: RunFolder, attempt: int) -> None:
    """Raise ConfigError if a rank or node of the attempt has no log."""
    known = [logs.label(path) for path in logs.files(folder, attempt)]
    for label in [f"{kind} {number}" for number in numbers]:
        if label not in known:
            listed = (
                ", ".join(known) if len(known) <= 12 else f"{', '.join(known[:8])} ... {len(known)} in all"
            )
            raise ConfigError(
                f"Attempt {attempt} has no log of {label}.", hint=f"It has: {listed or 'no logs'}."
            )
