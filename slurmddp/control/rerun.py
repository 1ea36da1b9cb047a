"""Read the command of a run, to start it again as a new run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import ConfigError
from slurmddp.host.free_name import first_free
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import refuse_file_of_others
from slurmddp.settings.arguments import key_of


@dataclass(frozen=True)
class Command:
    """The command that starts a new run with the settings of an existing run."""

    project_dir: Path
    """The folder in which the command must run."""
    settings: tuple[str, ...]
    """The typed settings, with a free name for the new run."""


def command_again(name: str | None) -> Command:
    """Return a command that starts a new run with the settings of an existing run and the name NAME-rerun.

    Args:
        name: name of a run, the beginning of a name, or a run folder; None: the newest run.

    Raises:
        RunNotFoundError: the name matches no run, or several.
        ConfigError: the run's project folder is gone, or its command can't be read or belongs to another
            account.
    """
    folder = index.find(name)
    if folder.overrides_file.exists():
        refuse_file_of_others(folder.overrides_file)

    config = folder.config()
    project_dir = Path(str(config.get("project_dir", folder.path.parent.parent)))
    if not project_dir.is_dir():
        raise ConfigError(
            f"The project of {folder.name} was {project_dir}, which does not exist any more.",
            hint="Start it in another folder with `slurmddp train`; "
            f"{folder.overrides_file} lists its settings.",
        )

    new_name = _free_name(str(config["name"]), folder)
    return Command(project_dir, (*_settings(folder), f"name={new_name}"))


def _settings(folder: RunFolder) -> list[str]:
    """Return the typed settings of a run, without `name=`; raise ConfigError if they can't be read."""
    try:
        overrides = folder.typed()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The command of {folder.name} can't be read: {error}.",
            hint="Start a run with the same settings by `slurmddp train`.",
        ) from error

    return [override for override in overrides if key_of(override) != "name"]


def _free_name(name: str, folder: RunFolder) -> str:
    """Return the first of `NAME-rerun`, `NAME-rerun-2`, ... that is not the `name=` of a run.

    Args:
        name: the `name=` of the existing run.
        folder: its run folder.
    """
    beside = [path.name for path in folder.path.parent.iterdir()]
    taken = {run.rpartition("-")[0] for run in [*beside, *(run.name for run in index.all_runs())]}
    base = re.sub(r"-rerun(-\d+)?$", "", name) + "-rerun"
    return first_free(f"{base}-", taken.__contains__, plain=base)
