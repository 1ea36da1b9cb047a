"""Compare two runs: the settings in which they differ, and their results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slurmddp.errors import RunNotFoundError, SlurmddpError
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.differing_settings import settings_of, settings_that_differ
from slurmddp.runs.report.goodput import read_goodput
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.slurm.client import SlurmClient

_RESULTS = ("state", "step", "total_steps", "loss", "held_out", "rate", "mfu", "attempts")


@dataclass(frozen=True)
class Difference:
    """The settings in which two runs differ, and the results of both."""

    runs: tuple[str, ...]
    """The names of both runs."""
    settings: Mapping[str, tuple[Any, ...]]
    """The values of both runs for each setting in which they differ; None: the run has no such setting."""
    results: Mapping[str, tuple[Any, ...]]
    """The values of both runs for each result: state, steps, losses, metrics, goodput and used hours."""


def diff(first: str, second: str | None = None, slurm: SlurmClient | None = None) -> Difference:
    """Compare two runs, with one query of SLURM for both.

    Args:
        first: name of a run, the beginning of a name, or a run folder.
        second: the second run, in the same forms; None: the newest run other than the first.
        slurm: the client of the SLURM to which the runs belong; None: the SLURM of this machine.

    Raises:
        RunNotFoundError: a name matches no run, or several.
        SlurmddpError: the configuration of a run can't be read.
    """
    folder = index.find(first)
    other = _newest_beside(folder) if second is None else index.find(second)
    runs = statuses([folder, other], slurm or SlurmClient())
    return Difference(
        runs=tuple(run.name for run in runs),
        settings=settings_that_differ(settings_of(folder), settings_of(other)),
        results=_results(*runs),
    )


def _newest_beside(folder: RunFolder) -> RunFolder:
    """Return the newest run other than `folder`; raise RunNotFoundError if there is none."""
    for other in index.all_runs():
        if other.path != folder.path:
            return other

    raise RunNotFoundError(
        f"There is no second run to compare {folder.name} with.", hint="`slurmddp list` lists all runs."
    )


def _results(*runs: RunStatus) -> dict[str, tuple[Any, ...]]:
    """Return the values of each result, one for each run, by the name of the result, such as `loss`.

    A run without the result has None. Results that no run has are left out.
    """
    facts = [{**vars(run), **run.metrics, **_times(run)} for run in runs]
    names = [*_RESULTS, *(name for run in runs for name in run.metrics), "goodput", "hours"]
    results = {name: tuple(values.get(name) for values in facts) for name in names}
    return {name: values for name, values in results.items() if any(value is not None for value in values)}


def _times(run: RunStatus) -> dict[str, Any]:
    # An unreadable record is no error here, because `state` and `detail` of the run report it.
    with suppress(SlurmddpError, OSError):
        goodput = read_goodput(RunFolder(run.path), run, time.time())
        return {"goodput": goodput.share, "hours": goodput.hours}
    return {}
