"""The command of a run once more, as a new run beside it."""

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
    """The settings of a run that is to start in another run's place."""

    project_dir: Path
    """The folder in which the command has to start."""
    settings: tuple[str, ...]
    """The settings as typed, with a name that is free."""


def command_again(name: str | None) -> Command:
    """Return the command of a run, with the name `NAME-rerun`.

    Args:
        name: name of the run, its beginning, or its folder; None: the newest run.

    Raises:
        RunNotFoundError: there is no such run, or there are several.
        ConfigError: the run's project is gone, its command can't be read, or belongs to another account.
    """
    folder = index.find(name)
    if folder.overrides_file.exists():
        refuse_file_of_others(folder.overrides_file)
    config = folder.config()
    project_dir = Path(str(config.get("project_dir", folder.path.parent.parent)))
    if not project_dir.is_dir():
        raise ConfigError(
            f"The project of {folder.name} was {project_dir}, which is not there any more.",
            hint="Start it in another folder with `slurmddp train`; "
            f"{folder.overrides_file} holds its settings.",
        )
    new_name = _free_name(str(config["name"]), folder)
    return Command(project_dir, (*_settings(folder), f"name={new_name}"))


def _settings(folder: RunFolder) -> list[str]:
    """Return the settings of a run as typed, without its name."""
    try:
        overrides = folder.typed()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The command of {folder.name} can't be read: {error}.", hint="Start it with `slurmddp train`."
        ) from error
    return [override for override in overrides if key_of(override) != "name"]


def _free_name(name: str, folder: RunFolder) -> str:
    """Return `NAME-rerun`, or `NAME-rerun-2` and so on if runs of that name exist."""
    beside = [path.name for path in folder.path.parent.iterdir()]
    taken = {run.rpartition("-")[0] for run in [*beside, *(run.name for run in index.all_runs())]}
    base = re.sub(r"-rerun(-\d+)?$", "", name) + "-rerun"
    return first_free(f"{base}-", taken.__contains__, plain=base)
