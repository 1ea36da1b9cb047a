"""Start a run's command once more, as a new run beside it.

slurmddp rerun first                    the new run is named first-rerun
slurmddp rerun first seed=1 nodes=4     with other settings

The run folder keeps the settings of a command, not its flags: give --config-name and the like again.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from slurmddp.cli.commands import train
from slurmddp.config.script_arguments import key_of
from slurmddp.errors import ConfigError
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import refuse_file_of_others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp rerun`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="name, its beginning, or folder (default: the newest run)"
    )
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="further settings: seed=1")
    train.add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Start a new run by the words of an existing one, in the folder of its project."""
    folder = index.find(args.run)
    if folder.overrides_file.exists():
        refuse_file_of_others(folder.overrides_file)
    config = folder.config()
    project = Path(str(config.get("project_dir", folder.path.parent.parent)))
    if not project.is_dir():
        raise ConfigError(
            f"The project of {folder.name} was {project}, which is not there any more.",
            hint="Start it in another folder with `slurmddp train`; "
            f"{folder.overrides_file} holds its settings.",
        )
    os.chdir(project)
    args.overrides = [*words_of(folder), f"name={free_name(str(config['name']), folder)}", *args.changes]
    return train.run(args)


def words_of(folder: RunFolder) -> list[str]:
    """Return the settings of a run as typed, without its name."""
    try:
        words = folder.typed()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The command of {folder.name} can't be read: {error}.", hint="Start it with `slurmddp train`."
        ) from error
    return [word for word in words if key_of(word) != "name"]


def free_name(name: str, folder: RunFolder) -> str:
    """Return `NAME-rerun`, or `NAME-rerun-2` and so on if runs of that name exist."""
    beside = [path.name for path in folder.path.parent.iterdir()]
    taken = {one.rpartition("-")[0] for one in [*beside, *(run.name for run in index.all_runs())]}
    base = re.sub(r"-rerun(-\d+)?$", "", name) + "-rerun"
    names = [base, *(f"{base}-{count}" for count in range(2, len(taken) + 3))]
    return next(one for one in names if one not in taken)
