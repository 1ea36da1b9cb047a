"""Let a command that takes a run take a sweep as well: it acts on each run of the sweep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from slurmddp.errors import RunStateError, combine_exit_codes
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder


def runs_of(name: str) -> list[RunFolder]:
    """Return the run with this name, or the started runs of the sweep with this name."""
    sweep = sweeps.find(name)
    return [index.find(name)] if sweep is None else sweep.started


def for_each_run(args: argparse.Namespace, one: Callable[[argparse.Namespace], int]) -> int:
    """Call `one` for the run that `args.run` names, or for each run of that sweep; return the exit code.

    A run of a sweep whose state does not allow the command is passed over.
    """
    if (sweep := sweeps.find(args.run)) is None:
        return one(args)
    codes = []
    for folder in sweep.started:
        try:
            codes.append(one(argparse.Namespace(**{**vars(args), "run": str(folder.path)})))
        except RunStateError as error:
            print(f"slurmddp: {error.message}", file=sys.stderr)
    return combine_exit_codes(codes)
