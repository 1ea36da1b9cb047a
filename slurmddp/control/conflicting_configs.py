"""Refuse to start a job whose configuration conflicts with an existing run or another job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slurmddp.errors import ConfigError, RunStateError, SlurmddpError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.short_text import first_items

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job

_LISTED_KEYS = 5
"""Number of keys that a refusal lists."""


def refuse_other_run(job: Job) -> None:
    """Raise ConfigError if the folder of a job holds a run with another configuration.

    Nothing is raised for an unreadable configuration, because the status of the run reports it.
    """
    from slurmddp.config.same_run import differences_of_runs

    folder = RunFolder(job.run_dir)
    if not folder.config_file.is_file():
        return

    try:
        stored = folder.config()
    except (SlurmddpError, OSError):
        return

    different = differences_of_runs(stored, job.program.config)
    if different:
        raise ConfigError(
            f"{folder.path} is another run whose name ends with the same digits: "
            f"{_listed(different, 'in that run', 'in this command')}. Nothing was started.",
            hint="Give this run another name=.",
        )


def refuse_collisions(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs without repetitions of the same run, in their order.

    Raises:
        ConfigError: two jobs have the same run name, but are different runs.
    """
    from slurmddp.config.same_run import differences_of_runs

    by_name: dict[str, Job] = {}
    for job in jobs:
        other = by_name.setdefault(job.run_name, job)
        if other is job or other.program.config == job.program.config:
            continue

        different = differences_of_runs(other.program.config, job.program.config)
        if different:
            raise ConfigError(
                f"Two runs have the same name {job.run_name}, because the digits at its end collide: "
                f"{_listed(different, 'in the first', 'in the second')}. Nothing was started.",
                hint="Give the second run another name=.",
            )

    return list(by_name.values())


def refuse_extended(job: Job) -> None:
    """Raise RunStateError if the job's run was extended, for example to more steps than the job has.

    A start of the job would shorten the run again.
    """
    from slurmddp.config.extension import lengths_beyond

    folder = RunFolder(job.run_dir)
    longer = lengths_beyond(folder.config(), job.program.config)
    if longer:
        lengths = _listed(longer, "in the run", "in this command")
        raise RunStateError(
            f"{folder.name} was extended: {lengths}. Nothing was started.",
            hint=f"`slurmddp resume {folder.name}` continues it up to its new length.",
        )


def _listed(different: list[tuple[str, str, str]], first: str, second: str) -> str:
    """Return a phrase such as "seed is 1 in that run, and 2 in this command" for up to `_LISTED_KEYS` keys.

    Args:
        different: each key with its value in the first and in the second run.
        first: phrase for the first run, such as "in that run".
        second: phrase for the second run.
    """
    texts = [f"{key} is {value} {first}, and {other} {second}" for key, value, other in different]
    return first_items(texts, _LISTED_KEYS, separator="; ", rest="; and {} more keys differ")
