"""Compare two runs: the settings in which they differ, and their results."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from slurmddp.config.identity import relevant
from slurmddp.errors import EXIT_FINISHED, SlurmddpError
from slurmddp.runs import index
from slurmddp.runs.folder import config_secrets
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.goodput import read_goodput
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.runs.text_format import number, percent, print_table
from slurmddp.slurm.client import SlurmClient

Pair = tuple[Any, Any]
_RESULTS = ("state", "step", "total_steps", "loss", "held_out", "rate", "mfu", "attempts")
_MISSING = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp diff`."""
    parser.add_argument("first", metavar="RUN", help="name, its beginning, or folder")
    parser.add_argument("second", metavar="RUN", help="name, its beginning, or folder")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the differences of two runs."""
    folders = [index.find(args.first), index.find(args.second)]
    first, second = statuses(folders, SlurmClient())
    settings = settings_that_differ(*(_settings(folder) for folder in folders))
    results = _results(first, second)
    names = (first.name, second.name)
    if args.json:
        print(json.dumps({"runs": names, "settings": settings, "results": results}, indent=2, default=str))
        return EXIT_FINISHED
    if settings:
        rows = [(key, *map(_setting, pair)) for key, pair in settings.items()]
        print_table(("SETTING", *names), rows, sys.stdout, whole=True)
    else:
        print("All settings are equal.")
    print()
    rows = [(key, *(_result(key, value) for value in pair)) for key, pair in results.items()]
    print_table(("RESULT", *names), rows, sys.stdout, whole=True)
    return EXIT_FINISHED


def settings_that_differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the settings of two runs that differ, by their full names; a missing one is None."""
    return {
        key: (first.get(key), second.get(key))
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    }


def _settings(folder: RunFolder) -> dict[str, Any]:
    config = config_secrets.for_readers(relevant(folder.config()))
    return {key: value for key, value in _flat(config) if key != "name"}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _results(first: RunStatus, second: RunStatus) -> dict[str, Pair]:
    """Return the results of two runs by name, without those that neither has."""
    plain = [{**one.as_json(), **one.metrics, **_times(one)} for one in (first, second)]
    names = [*_RESULTS, *first.metrics, *second.metrics, "goodput", "hours"]
    pairs = {name: (plain[0].get(name), plain[1].get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair != (None, None)}


def _times(one: RunStatus) -> dict[str, Any]:
    with suppress(SlurmddpError, OSError):  # The state tells of an unreadable record.
        goodput = read_goodput(RunFolder(one.path), one, time.time())
        return {"goodput": goodput.share, "hours": goodput.hours}
    return {}


def _setting(value: Any) -> str:
    return _MISSING if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _result(key: str, value: Any) -> str:
    if value is None:
        return _MISSING
    if key in ("goodput", "mfu"):
        return percent(value)
    return number(value) if isinstance(value, float) else str(value)
