"""Run your own script, module or command as every rank, here or on a cluster.

    slurmddp run train.py --lr 1e-3
    slurmddp run -n 4 -m package.train --lr 1e-3
    slurmddp run +cluster=a100x8 nodes=3 train.py --lr 1e-3
    slurmddp run +cluster=cpu nodes=2 -- ./solve.sh --grid 64

Type settings and flags before the program, and its arguments after it. A file that ends in .py is a Python
script; any other word is a command. The program gets its arguments as typed, except that `{run_dir}` becomes
the run folder, and `${lr}` the value of your own key lr:

    slurmddp run --multirun +lr=1e-3,1e-4 train.py --lr '${lr}'

The same command finds the same run and resumes it.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slurmddp.cli import hydra_flags
from slurmddp.cli.commands import train
from slurmddp.cli.commands.exec import add_count
from slurmddp.cli.commands.exec import split as split_before
from slurmddp.cli.json_output import add_json
from slurmddp.cli.messages import EXIT_CODES_HELP
from slurmddp.control.jobs import own_keys, settings_of_program
from slurmddp.errors import ConfigError, UsageError
from slurmddp.settings.removed import REMOVED_TORCHRUN, torchrun_command

if TYPE_CHECKING:
    from slurmddp.settings.spec import Job

_SETTING_OR_FLAG = re.compile(r"-|[+~]{0,2}[\w./@-]+=|~")
_WITH_VALUE = {**hydra_flags.WITH_VALUE, "--launcher": ()}


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into slurmddp's own arguments, and the program: `[-m] PROGRAM ARGUMENT...`."""
    return split_before(arguments, lambda word: word == "-m" or not _SETTING_OR_FLAG.match(word), _WITH_VALUE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slurmddp run`."""
    parser.usage = (
        "slurmddp run [key=value ...] [flags] [--] (SCRIPT.py | -m MODULE | COMMAND) [argument ...]"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for `slurmddp train`")
    add_count(parser, "-n", "--ranks", purpose="ranks on each node (ranks_per_node)")
    parser.add_argument("-m", metavar="MODULE", help="run this module, as `python -m` does")
    # This flag no longer exists. It is still parsed, so that `_refuse_launcher` can name its replacement.
    parser.add_argument("--launcher", help=argparse.SUPPRESS)
    hydra_flags.add_multirun(parser)
    train.add_flags(parser)
    add_json(parser)
    parser.epilog = EXIT_CODES_HELP


def run(args: argparse.Namespace, check: Callable[[Job], object] = lambda job: None) -> int:
    """Run the program as every rank, submit it, or show the job; return the exit code.

    Args:
        args: the parsed command line; `args.program` is the program and its arguments.
        check: called with the job before it starts; raises ConfigError if the job must not be started.
    """
    _refuse_launcher(args)
    program = settings_of_program(args.program, own_keys(args.overrides))
    for word in args.overrides:
        if word.lstrip("+").startswith(("program.script=", "program.args=")):
            raise UsageError(
                f"{word!r} is given as a setting, but slurmddp run takes the script and its arguments from "
                "the end of the command line.",
                hint="Omit the setting: slurmddp run SCRIPT.py ARGUMENT ...",
            )

    args.overrides += program
    if args.ranks is None:
        return train.run(args, check)

    args.overrides.append(f"ranks_per_node={args.ranks}")

    try:
        return train.run(args, check)
    except ConfigError as error:
        # The command line has -n in place of the setting, so the message names -n, too.
        error.message = error.message.replace("ranks_per_node=", "-n ")
        error.hint = error.hint.replace("ranks_per_node=", "-n ")
        raise


def _refuse_launcher(args: argparse.Namespace) -> None:
    """Raise UsageError for the removed flag `--launcher` and the removed setting `program.torchrun`.

    The hint is the command that starts the same program by torchrun.
    """
    settings = [word for word in args.overrides if not word.lstrip("+").startswith(REMOVED_TORCHRUN)]
    if args.launcher is None and len(settings) == len(args.overrides):
        return
    if args.launcher not in (None, "torchrun"):
        raise UsageError(
            f"slurmddp run has no flag --launcher, which was given as {args.launcher!r}.",
            hint="The setting launcher=NAME chooses how jobs are started.",
        )

    counts = [word.partition("=")[2] for word in settings if word.startswith("ranks_per_node=")]
    settings = [word for word in settings if not word.startswith("ranks_per_node=")]
    ranks = args.ranks or (counts[-1] if counts else "auto")
    nodes = [word.partition("=")[2] for word in settings if word.startswith("nodes=")]
    command = torchrun_command(ranks, args.program, has_nodes=nodes[-1:] not in ([], ["1"]))
    raise UsageError(
        "slurmddp run has no flag or setting for torchrun any more: torchrun is a command like any other, "
        "which runs as one rank on each node.",
        hint=f"Type {shlex.join(['slurmddp', 'run', *settings, '-n', '1', '--', *command])}",
    )
