"""Find the jobs of the runs that must finish before a job starts: `after=RUN`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmddp.errors import ConfigError, RunNotFoundError
from slurmddp.runs import index, sweeps
from slurmddp.runs.status.run_status import statuses
from slurmddp.slurm import client

if TYPE_CHECKING:
    from slurmddp.runs.folder.layout import RunFolder
    from slurmddp.runs.status.run_status import RunStatus

_HINT = "Say after=[] to start without it."


def jobs_of(names: Sequence[str], launcher: str) -> tuple[str, ...]:
    """Return the ids of the jobs for which a job waits; runs that have finished need no wait.

    Args:
        names: runs or sweeps, by name, beginning of a name, or folder.
        launcher: `slurm`, or `local` for a run that can't wait.

    Raises:
        RunNotFoundError: there is no such run, or there are several.
        ConfigError: a run has ended without finishing, or its end can't be waited for.
    """
    folders = [folder for name in names for folder in _folders(name)]
    found = [one for one in statuses(folders, client.SlurmClient()) if one.state != "finished"]
    for one in found:
        _refuse_hopeless(one, launcher)
    return tuple(dict.fromkeys(str(one.job_id) for one in found))


def _folders(name: str) -> Sequence[RunFolder]:
    try:
        sweep = sweeps.find(name)
        return [index.find(name)] if sweep is None else sweep.runs
    except RunNotFoundError as error:
        raise RunNotFoundError(f"after={name}: {error.message}", hint=f"{error.hint} {_HINT}") from error


def _refuse_hopeless(one: RunStatus, launcher: str) -> None:
    """Raise ConfigError if a job that waits for this run would wait for ever, or can't wait."""
    if not one.active:
        raise ConfigError(
            f"after={one.name}: this run is {one.state}, so the job would never start.",
            hint=f"First `slurmddp resume {one.name}`. {_HINT}",
        )
    if launcher != "slurm" or one.launcher == "local" or one.job_id is None:
        raise ConfigError(
            f"after={one.name}: this run is {one.state}, and only jobs of SLURM wait for each other.",
            hint=f"`slurmddp logs -f {one.name}` waits for its end. {_HINT}",
        )
