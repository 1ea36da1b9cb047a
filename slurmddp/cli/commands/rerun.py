"""Start a run's command once more, as a new run beside it.

slurmddp rerun first                    the new run is named first-rerun
slurmddp rerun first seed=1 nodes=4     with other settings

The run folder keeps the settings of a command, not its flags: give --config-name and the like again.
"""

from __future__ import annotations

import argparse
import os

from slurmddp.cli.commands import train
from slurmddp.cli.json_output import add_json
from slurmddp.control.rerun import command_again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp rerun`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="name, its beginning, or folder (default: the newest run)"
    )
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="further settings: seed=1")
    train.add_flags(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Start a new run by the words of an existing one, in the folder of its project."""
    command = command_again(args.run)
    os.chdir(command.project_dir)
    args.overrides = [*command.settings, *args.changes]
    return train.run(args)
