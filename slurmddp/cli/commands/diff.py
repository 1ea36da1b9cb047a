"""Compare two runs: the settings in which they differ, and their results."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import suppress
from typing import Any

from slurmddp.control.contract import json_value
from slurmddp.errors import EXIT_FINISHED, RunNotFoundError, SlurmddpError
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.goodput import read_goodput
from slurmddp.runs.report.settings import as_text, settings_of, settings_that_differ
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.runs.text_format import number, percent, print_table
from slurmddp.slurm.client import SlurmClient

Pair = tuple[Any, Any]
_RESULTS = ("state", "step", "total_steps", "loss", "held_out", "rate", "mfu", "attempts")
_MISSING = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp diff`."""
    parser.add_argument("first", metavar="RUN", help="name, its beginning, or folder")
    parser.add_argument(
        "second",
        nargs="?",
        metavar="RUN",
        help="name, its beginning, or folder (default: the newest run beside the first)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the differences of two runs."""
    first_folder = index.find(args.first)
    folders = [first_folder, _newest_beside(first_folder) if args.second is None else index.find(args.second)]
    first, second = statuses(folders, SlurmClient())
    settings = settings_that_differ(*map(settings_of, folders))
    results = _results(first, second)
    names = (first.name, second.name)
    if args.json:
        print(json.dumps({"runs": names, "settings": settings, "results": results}, indent=2, default=str))
        return EXIT_FINISHED
    if settings:
        rows = [(key, *map(as_text, pair)) for key, pair in settings.items()]
        print_table(("SETTING", *names), rows, sys.stdout, whole=True)
    else:
        print("All settings are equal.")
    print()
    rows = [(key, *(_result(key, value) for value in pair)) for key, pair in results.items()]
    print_table(("RESULT", *names), rows, sys.stdout, whole=True)
    return EXIT_FINISHED


def _newest_beside(folder: RunFolder) -> RunFolder:
    """Return the newest of the other runs; raises RunNotFoundError without one."""
    for other in index.all_runs():
        if other.path != folder.path:
            return other
    raise RunNotFoundError(f"There is no other run than {folder.name}.", hint="See `slurmddp list`.")


def _results(first: RunStatus, second: RunStatus) -> dict[str, Pair]:
    """Return the results of two runs by name, without those that neither has."""
    facts = [{**json_value(status), **status.metrics, **_times(status)} for status in (first, second)]
    names = [*_RESULTS, *first.metrics, *second.metrics, "goodput", "hours"]
    pairs = {name: (facts[0].get(name), facts[1].get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair != (None, None)}


def _times(one: RunStatus) -> dict[str, Any]:
    with suppress(SlurmddpError, OSError):  # The state tells of an unreadable record.
        goodput = read_goodput(RunFolder(one.path), one, time.time())
        return {"goodput": goodput.share, "hours": goodput.hours}
    return {}


def _result(key: str, value: Any) -> str:
    if value is None:
        return _MISSING
    if key in ("goodput", "mfu"):
        return percent(value)
    return number(value) if isinstance(value, float) else str(value)
