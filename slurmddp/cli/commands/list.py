"""List the runs of this account, the newest activity first, or the runs of a sweep.

Login nodes to which runs were submitted over ssh are asked as well; HOST: stands before the folders there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cli.messages import print_event
from slurmddp.config.script_arguments import FREE_ARGUMENTS, key_of, on_one_line
from slurmddp.control.contract import json_value
from slurmddp.control.ssh.runs import runs_of_sweep
from slurmddp.control.ssh.statuses import PacedHosts, statuses_over_ssh
from slurmddp.errors import ConfigError, RunNotFoundError, near_matches
from slurmddp.runs import index, ssh_runs, sweeps
from slurmddp.runs.folder import config_secrets
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.runs.text_format import STATE_STYLES, duration, number, print_table, rich_table, shorter
from slurmddp.slurm.client import SlurmClient

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
    form.add_argument("--json", action="store_true", help="print JSON, for programs")
    form.add_argument(
        "--watch",
        action="store_true",
        help="keep the table up to date; SLURM and each host are asked at most once in 30 s",
    )


def run(args: argparse.Namespace) -> int:
    """Print one line per run, after one request to SLURM for all runs."""
    if args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}.", hint="Give at least 1, or --all.")
    if args.watch and args.sweep and (remote := ssh_runs.find(args.sweep)) is not None:
        runs_over_ssh = PacedHosts(runs_of_sweep(remote))
        return _watch(list, None, runs_over_ssh.statuses, frozenset(args.state or ()))
    sweep = None if args.sweep is None else _sweep(args.sweep)
    limit = None if args.all or args.sweep else args.limit
    states = frozenset(args.state or ())

    def read() -> list[str]:
        paths = index.run_paths() if sweep is None else [str(run.path) for run in sweep.started]
        return [path for path in paths if Path(path).name.startswith(args.name)]

    def named(there: Callable[[], Sequence[RunStatus]]) -> list[RunStatus]:
        return [one for one in there() if one.name.startswith(args.name)] if sweep is None else []

    if args.watch:
        hosts = PacedHosts()
        return _watch(read, limit, lambda: named(hosts.statuses), states)
    there = named(partial(statuses_over_ssh, print_event))
    return show(
        [*map(RunFolder, read())], as_json=args.json, limit=limit, states=states, there=there, name=args.name
    )


def _watch(
    runs: Callable[[], list[str]],
    limit: int | None,
    there: Callable[[], Sequence[RunStatus]],
    states: frozenset[str],
) -> int:
    from slurmddp.cli.list_view import ListView
    from slurmddp.slurm.paced_client import PacedClient

    def table(found: Sequence[RunStatus]) -> Table:
        rows, styles = _rows(found, time.time())
        return rich_table(HEADERS, rows, right=_NUMBERS, styles=styles)

    return ListView(runs, limit, table, PacedClient(), there, states).watch()


def _sweep(name: str) -> sweeps.Sweep:
    sweep = sweeps.find_to_show(name)
    if sweep is None:
        raise RunNotFoundError(
            f"There is no sweep {name!r}.",
            hint=near_matches(name, sweeps.names())
            or f"`slurmddp train -m seed=1,2` starts one. `slurmddp list --name {name}` lists runs.",
        )
    if left := len(sweep.runs) - len(sweep.started):
        print(f"{left} of {len(sweep.runs)} points have no run folder.", file=sys.stderr)
    return sweep


def show(
    runs: Sequence[RunFolder],
    *,
    as_json: bool,
    limit: int | None = None,
    states: frozenset[str] = frozenset(),
    there: Sequence[RunStatus] = (),
    name: str = "",
) -> int:
    """Print a table of runs and of runs over ssh, the newest activity first.

    Args:
        runs: the runs of this machine.
        as_json: whether to print JSON.
        limit: shows so many runs, at most; None: all.
        states: shows only runs in these states; empty: in any.
        there: the runs over ssh.
        name: the beginning of the names by which the runs were chosen; empty: all.
    """
    read = runs if states else runs[:limit]
    found = [*statuses(read, SlurmClient()), *there]
    found = [one for one in found if not states or one.state in states]
    if there:
        found.sort(key=lambda one: one.seen or one.created or 0.0, reverse=True)
    more = len(found[limit:]) if limit else 0
    more, found = more + len(runs) - len(read), found[:limit]
    if as_json:
        print(json.dumps(json_value(found), indent=2, allow_nan=False))
        return 0
    if not found:
        none = f"No run's name begins with {name}" if name else "There are no runs yet"
        none = "No run is in this state" if states else none
        print(f"{none}. `slurmddp list --all` shows all runs, `slurmddp train` starts one.", file=sys.stderr)
        return 0
    rows, styles = _rows(found, time.time())
    print_table(HEADERS, rows, sys.stdout, right=_NUMBERS, styles=styles)
    for sentence in dict.fromkeys(one.detail for one in found if one.state == "unknown"):
        print(f"unknown: {sentence}", file=sys.stderr)
    if more:
        print(f"{more} more; `slurmddp list --all` shows them.", file=sys.stderr)
    return 0


def _rows(found: Sequence[RunStatus], now: float) -> tuple[Sequence[Sequence[str]], list[str]]:
    """Return the cells of the table, and the colour of each row's state."""
    shown = settings(found)
    rows = [
        (
            one.name,
            f"{one.state} ({one.stop_reason})" if one.stop_reason else one.state,
            steps(one),
            number(one.loss),
            one.allocation or one.job_id or "-",
            "-" if one.created is None else duration(now - one.created),
            shown[one.path],
            str(one.path.parent),
        )
        for one in found
    ]
    return rows, [STATE_STYLES[one.state] for one in found]


def settings(found: Sequence[RunStatus]) -> dict[Path, str]:
    """Return the typed settings of each run, without settings that all runs of the same `name=` share."""
    typed = {one.path: _typed(RunFolder(one.path)) for one in found}
    names = {one.path: one.name.rpartition("-")[0] or one.name for one in found}
    shown = {}
    for path, words in typed.items():
        alike = [typed[other] for other in typed if names[other] == names[path]]
        shared = set.intersection(*map(set, alike)) if len(alike) > 1 else set()
        own = [word for word in words if word not in shared or word.startswith("program.script=")]
        text = shorter(on_one_line(own))
        shown[path] = text if len(text) <= _SETTINGS_CHARS else f"{text[: _SETTINGS_CHARS - 3]}..."
    return shown


def _typed(folder: RunFolder) -> list[str]:
    try:
        words = folder.typed()
    except (OSError, ValueError):
        return []
    shown = [word for word in words if key_of(word) not in ("name", "cluster", FREE_ARGUMENTS)]
    return [config_secrets.word_for_readers(word) for word in shown]


def steps(one: RunStatus) -> str:
    """Return the progress of a run: `270/400`."""
    reached = "-" if one.step is None else str(one.step)
    return f"{reached}/{one.total_steps}" if one.total_steps is not None else reached
