"""Start a run's command once more, as a new run beside it.

slurmddp rerun first                    the new run is named first-rerun
slurmddp rerun first seed=1 nodes=4     with other settings

The run folder records the settings of a command, but not its flags: type --config-name and other flags again.
"""

from __future__ import annotations

import argparse
import os

from slurmddp.cli.commands import train
from slurmddp.cli.json_output import add_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.rerun import command_again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp rerun`."""
    add_run(parser, is_required=False)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="settings to change: seed=1")
    train.add_flags(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Start a new run with the settings of an existing run, from the project folder of that run."""
    command = command_again(args.run)
    os.chdir(command.project_dir)
    args.overrides = [*command.settings, *args.changes]
    return train.run(args)
