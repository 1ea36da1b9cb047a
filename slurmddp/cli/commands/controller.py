"""Run one script that controls tensors on workers, here or on a cluster.

    slurmddp controller -n 4 script.py --lr 1e-3
    slurmddp controller +cluster=a100x8 nodes=2 script.py --lr 1e-3

The workers are ranks. The script runs once, on the first node, and reaches them with `remote.workers()`.
Without settings the ranks start now and in this terminal, as with `slurmddp exec`. With settings they are a
run with a run folder, as with `slurmddp run`. Type settings and flags before the script, and arguments of the
script after it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

from slurmddp.cli.commands import run as run_command
from slurmddp.cli.commands import train
from slurmddp.cli.commands.exec import add_count
from slurmddp.cli.messages import EXIT_CODES_HELP
from slurmddp.environments.names import SECRET_VARIABLE
from slurmddp.errors import UsageError

split = run_command.split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slurmddp controller`."""
    parser.usage = "slurmddp controller [key=value ...] [flags] [--] (SCRIPT.py | -m MODULE) [argument ...]"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for `slurmddp train`")
    add_count(parser, "-n", "--ranks", purpose="number of workers; with settings, number on each node")
    train.add_flags(parser)
    parser.set_defaults(launcher=None, json=False)
    parser.epilog = EXIT_CODES_HELP


def run(args: argparse.Namespace) -> int:
    """Start the workers and the script, or submit them; return the exit code."""
    # Imported here, so that --help does not wait for these modules.
    from slurmddp.config.checks.paths import check_script
    from slurmddp.launchers.local import exec as ranks
    from slurmddp.settings.spec import CONTROLLER, first_script

    worker = CONTROLLER.split()
    if args.program in ([], ["-m"]):
        raise UsageError("slurmddp controller needs a script: slurmddp controller -n 4 script.py")
    if args.overrides:
        args.program = [*worker, *args.program]
        return run_command.run(args)
    if args.ranks is None:
        raise UsageError("slurmddp controller needs a number of workers: slurmddp controller -n 4 ...")

    check_script(first_script(args.program), Path.cwd(), same_python=True)
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))

    return ranks.run([sys.executable, *worker, *args.program], args.ranks, None)
