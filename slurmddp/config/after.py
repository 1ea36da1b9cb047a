"""Find the SLURM jobs that must finish before a new job starts, for the setting `after=RUN`."""

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

_HINT = "Use after=[] to start without this run."


def jobs_of(names: Sequence[str], launcher: str) -> tuple[str, ...]:
    """Return the ids of the SLURM jobs that must finish before a new job starts.

    Runs that have finished are left out, because the new job need not wait for them.

    Args:
        names: runs or sweeps, each given by its name, the beginning of its name, or its folder.
        launcher: the launcher of the new job; only a job of the launcher `slurm` can wait.

    Raises:
        RunNotFoundError: one of `names` belongs to no run, or to several runs.
        ConfigError: a run ended without finishing, or the run or the new job is no SLURM job, so that SLURM
            can't make the new job wait.
    """
    folders = [folder for name in names for folder in _folders(name)]
    unfinished = [status for status in statuses(folders, client.SlurmClient()) if status.state != "finished"]
    for status in unfinished:
        _refuse_hopeless(status, launcher)
    return tuple(dict.fromkeys(str(status.job_id) for status in unfinished))


def _folders(name: str) -> Sequence[RunFolder]:
    """Return the run folder of the run `name`, or the run folders of the sweep `name`."""
    try:
        sweep = sweeps.find(name)
        if sweep is not None:
            return sweep.runs
        return [index.find(name)]
    except RunNotFoundError as error:
        raise RunNotFoundError(f"after={name}: {error.message}", hint=f"{error.hint} {_HINT}") from error


def _refuse_hopeless(status: RunStatus, launcher: str) -> None:
    """Raise ConfigError if a new job would wait for a run forever, or if job or run are not on SLURM."""
    if not status.active:
        raise ConfigError(
            f"after={status.name}: this run is {status.state}, so the job would never start.",
            hint=f"First `slurmddp resume {status.name}`. {_HINT}",
        )
    if launcher != "slurm" or status.launcher == "local" or status.job_id is None:
        raise ConfigError(
            f"after={status.name}: this run is {status.state}, but only SLURM jobs can wait for each other.",
            hint=f"`slurmddp logs -f {status.name}` waits for the end of the run. {_HINT}",
        )
