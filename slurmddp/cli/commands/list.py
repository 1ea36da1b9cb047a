"""List your runs, the most recently active first, or the runs of one sweep.

The list includes runs that were submitted over ssh; their folders begin with HOST: of the login node.
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
    parser.add_argument(
        "sweep", nargs="?", metavar="SWEEP", help="show all runs of this sweep, and no others"
    )
    parser.add_argument(
        "-n",
        "--limit",
        type=int,
        default=20,
        metavar="N",
        help="show at most N runs, the most recently active ones (default: 20)",
    )
    parser.add_argument("--all", action="store_true", help="show all runs")
    parser.add_argument(
        "--name", default="", metavar="NAME", help="show only runs whose names begin with NAME"
    )
    parser.add_argument(
        "--state",
        action="append",
        choices=sorted(STATE_STYLES),
        metavar="STATE",
        help=f"show only runs in this state ({', '.join(STATE_STYLES)}); may be repeated",
    )
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument(
        "--watch",
        action="store_true",
        help="keep the table up to date; SLURM and each login node are queried at most every 30 s",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table of runs, or keep it up to date with `--watch`; return the exit code."""
    if args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}.", hint="Use at least 1, or --all.")

    limit = None if args.all or args.sweep else args.limit
    states = frozenset(args.state or ())
    if args.watch:
        return _watch(args.sweep, args.name, limit, states)

    over_ssh = [] if args.sweep else _statuses_over_ssh()
    result = list_runs(args.sweep, name=args.name, states=states, limit=limit, over_ssh=over_ssh)
    if args.json:
        print_json(result)
    else:
        print_listing(result, name=args.name, states=states)

    return EXIT_FINISHED


def _statuses_over_ssh() -> list[RunStatus]:
    """Query the login nodes for the statuses of the runs that were submitted over ssh."""
    if not ssh_runs.are_recorded():
        return []

    # Imported only if runs over ssh are recorded, because the modules that connect to hosts load slowly.
    from slurmddp.control.ssh.statuses import statuses_over_ssh

    return statuses_over_ssh(print_event)


def _watch(sweep: str | None, name: str, limit: int | None, states: frozenset[str]) -> int:
    """Show the table of the selected runs, and refresh it, until q is typed; return the exit code.

    Args:
        sweep: the sweep whose runs are shown; None: the runs of all sweeps and all other runs.
        name: the beginning of the names of the runs to show; empty: all names.
        limit: the largest number of runs to show; None: as many as fit the screen.
        states: the states of the runs to show; empty: all states.
    """
    # Imported here, because only --watch needs these modules.
    from slurmddp.cli.list_watch import ListView
    from slurmddp.control.ssh.runs import runs_of_sweep
    from slurmddp.control.ssh.statuses import PacedHosts
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
        listing: the runs, and the numbers of runs and points that are not in it.
        name: the beginning of the names of the selected runs; empty: all names.
        states: the states of the selected runs; empty: all states.
    """
    if listing.missing:
        print(f"{listing.missing} of {listing.points} points have no run folder.", file=sys.stderr)

    if not listing.runs:
        if states:
            reason = "No run is in this state"
        elif name:
            reason = f"No run has a name that begins with {name}"
        else:
            reason = "There are no runs yet"
        print(
            f"{reason}. `slurmddp list --all` lists all runs, `slurmddp train` starts one.", file=sys.stderr
        )
        return

    rows, styles = _rows(listing.runs, time.time())
    print_table(HEADERS, rows, sys.stdout, right=_NUMBERS, styles=styles)
    for sentence in dict.fromkeys(run.detail for run in listing.runs if run.state == "unknown"):
        print(f"unknown: {sentence}", file=sys.stderr)

    if listing.more:
        print(f"{listing.more} more; `slurmddp list --all` lists them.", file=sys.stderr)


def _rows(runs: Sequence[RunStatus], now: float) -> tuple[Sequence[Sequence[str]], list[str]]:
    """Return the rows of the table, in the order of `HEADERS`, and the color of the state in each row."""
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
    """Return the settings with which each run was started, as one short line, by the path of the run.

    Settings that all runs with the same `name=` share are left out.
    """
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
    """Return the settings with which a run was started, without its name and cluster.

    Secrets are hidden. Empty if the record of the settings can't be read.
    """
    try:
        overrides = folder.typed()
    except (OSError, ValueError):
        return []

    hidden = ("name", "cluster", FREE_ARGUMENTS)
    shown = [override for override in overrides if key_of(override) not in hidden]
    return [config_secrets.argument_for_readers(override) for override in shown]


def steps(run: RunStatus) -> str:
    """Return the last step of a run, with the number of all its steps if that is known: `270/400`."""
    reached = "-" if run.step is None else str(run.step)
    return f"{reached}/{run.total_steps}" if run.total_steps is not None else reached
