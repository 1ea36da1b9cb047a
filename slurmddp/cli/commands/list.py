"""List the runs of this account, the newest activity first, or the runs of a sweep.

Login nodes to which runs were submitted over ssh are asked as well; HOST: stands before the folders there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.messages import print_event
from slurmddp.control.listing import Listing, find_sweep, list_runs, paths_of
from slurmddp.control.ssh.runs import runs_of_sweep
from slurmddp.control.ssh.statuses import PacedHosts, statuses_over_ssh
from slurmddp.errors import EXIT_FINISHED, ConfigError
from slurmddp.runs import ssh_runs
from slurmddp.runs.folder import config_secrets
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.runs.text_format import STATE_STYLES, duration, number, print_table, rich_table, shorter
from slurmddp.settings.arguments import FREE_ARGUMENTS, key_of, on_one_line
from slurmddp.short_text import shorten

if TYPE_CHECKING:
    from rich.table import Table

HEADERS = ("NAME", "STATE", "STEP", "LOSS", "JOB", "AGE", "SETTINGS", "FOLDER")
_NUMBERS = frozenset({"STEP", "LOSS", "AGE"})
_SETTINGS_CHARS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp list`."""
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="only the runs of this sweep, all of them")
    parser.add_argument(
        "-n", "--limit", type=int, default=20, metavar="N", help="show the N newest (default: 20)"
    )
    parser.add_argument("--all", action="store_true", help="show all runs")
    parser.add_argument("--name", default="", metavar="NAME", help="only runs whose names begin with NAME")
    parser.add_argument(
        "--state",
        action="append",
        choices=sorted(STATE_STYLES),
        metavar="STATE",
        help=f"only runs in this state ({', '.join(STATE_STYLES)}); may be repeated",
    )
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument(
        "--watch",
        action="store_true",
        help="keep the table up to date; SLURM and each host are asked at most once in 30 s",
    )


def run(args: argparse.Namespace) -> int:
    """Print one line per run, after one request to SLURM for all runs."""
    if args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}.", hint="Give at least 1, or --all.")
    limit = None if args.all or args.sweep else args.limit
    states = frozenset(args.state or ())
    if args.watch:
        return _watch(args.sweep, args.name, limit, states)
    over_ssh = [] if args.sweep else statuses_over_ssh(print_event)
    result = list_runs(args.sweep, name=args.name, states=states, limit=limit, over_ssh=over_ssh)
    if args.json:
        print_json(result)
    else:
        print_listing(result, name=args.name, states=states)
    return EXIT_FINISHED


def _watch(sweep: str | None, name: str, limit: int | None, states: frozenset[str]) -> int:
    """Show the table of chosen runs until the reader quits."""
    from slurmddp.cli.list_view import ListView
    from slurmddp.slurm.paced_client import PacedClient

    def table(runs: Sequence[RunStatus]) -> Table:
        rows, styles = _rows(runs, time.time())
        return rich_table(HEADERS, rows, right=_NUMBERS, styles=styles)

    remote = ssh_runs.find(sweep) if sweep else None
    if remote is not None:
        hosts = PacedHosts(runs_of_sweep(remote))
        return ListView(list, None, table, PacedClient(), hosts.statuses, states).watch()
    if sweep is not None:
        paths = partial(paths_of, find_sweep(sweep), name)
        return ListView(paths, limit, table, PacedClient(), states=states).watch()
    hosts = PacedHosts()

    def over_ssh() -> list[RunStatus]:
        return [run for run in hosts.statuses() if run.name.startswith(name)]

    return ListView(partial(paths_of, None, name), limit, table, PacedClient(), over_ssh, states).watch()


def print_listing(listing: Listing, *, name: str = "", states: Collection[str] = ()) -> None:
    """Print a table of runs.

    Args:
        listing: the runs.
        name: the beginning of the names by which the runs were chosen; empty: all.
        states: the states by which they were chosen; empty: any.
    """
    if listing.missing:
        print(f"{listing.missing} of {listing.points} points have no run folder.", file=sys.stderr)
    if not listing.runs:
        none = f"No run's name begins with {name}" if name else "There are no runs yet"
        none = "No run is in this state" if states else none
        print(f"{none}. `slurmddp list --all` shows all runs, `slurmddp train` starts one.", file=sys.stderr)
        return
    rows, styles = _rows(listing.runs, time.time())
    print_table(HEADERS, rows, sys.stdout, right=_NUMBERS, styles=styles)
    for sentence in dict.fromkeys(run.detail for run in listing.runs if run.state == "unknown"):
        print(f"unknown: {sentence}", file=sys.stderr)
    if listing.more:
        print(f"{listing.more} more; `slurmddp list --all` shows them.", file=sys.stderr)


def _rows(runs: Sequence[RunStatus], now: float) -> tuple[Sequence[Sequence[str]], list[str]]:
    """Return the cells of the table, and the colour of each row's state."""
    shown = settings(runs)
    rows = [
        (
            run.name,
            f"{run.state} ({run.stop_reason})" if run.stop_reason else run.state,
            steps(run),
            number(run.loss),
            run.allocation or run.job_id or "-",
            "-" if run.created is None else duration(now - run.created),
            shown[run.path],
            str(run.path.parent),
        )
        for run in runs
    ]
    return rows, [STATE_STYLES[run.state] for run in runs]


def settings(runs: Sequence[RunStatus]) -> dict[Path, str]:
    """Return the typed settings of each run, without settings that all runs of the same `name=` share."""
    typed = {run.path: _typed(RunFolder(run.path)) for run in runs}
    names = {run.path: run.name.rpartition("-")[0] or run.name for run in runs}
    shown = {}
    for path, words in typed.items():
        alike = [typed[other] for other in typed if names[other] == names[path]]
        shared = set.intersection(*map(set, alike)) if len(alike) > 1 else set()
        distinct = [word for word in words if word not in shared or word.startswith("program.script=")]
        shown[path] = shorten(shorter(on_one_line(distinct)), _SETTINGS_CHARS)
    return shown


def _typed(folder: RunFolder) -> list[str]:
    try:
        overrides = folder.typed()
    except (OSError, ValueError):
        return []
    hidden = ("name", "cluster", FREE_ARGUMENTS)
    shown = [override for override in overrides if key_of(override) not in hidden]
    return [config_secrets.argument_for_readers(override) for override in shown]


def steps(run: RunStatus) -> str:
    """Return the progress of a run: `270/400`."""
    reached = "-" if run.step is None else str(run.step)
    return f"{reached}/{run.total_steps}" if run.total_steps is not None else reached
