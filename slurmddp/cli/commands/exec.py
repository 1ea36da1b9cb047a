"""Run any program as ranks, now and in this terminal, as mpiexec does.

    slurmddp exec -n 4 ./solver --grid 64
    slurmddp exec -n 4 --nodes 2 -- python train.py

Each rank finds its number in the variables of torchrun (RANK, WORLD_SIZE, ...) and of MPI
(OMPI_COMM_WORLD_RANK, PMI_RANK, ...). Each line of output begins with the rank. Rank 0 reads the standard
input, unless it is a terminal. Signals reach all ranks. If a rank fails, all ranks end, and the exit code is
the code of the first failed rank, or 128 plus the number of its signal. In an allocation (salloc, sbatch) the
ranks run on the nodes of the allocation. This command creates no run folder and restarts nothing;
`slurmddp run` does both.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from slurmddp.errors import ConfigError, UsageError

_WITH_VALUE = ("-n", "-np", "--ranks", "--nodes")


def split(
    arguments: Sequence[str],
    begins: Callable[[str], bool] = lambda word: not word.startswith("-"),
    with_value: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[list[str], list[str]]:
    """Split a command line at the first word of the program, or at `--`, which is dropped.

    Args:
        arguments: all words after the name of the command.
        begins: returns whether a word, which is not the value of a flag, is the first word of the program.
        with_value: flags besides `_WITH_VALUE` whose next word may be their value. A flag without listed
            values always takes the next word; a flag with listed values takes it only if it is listed.

    Returns:
        The arguments of slurmddp, and the program with its arguments; the latter is empty without a program.
    """
    at = 0
    while at < len(arguments):
        word = arguments[at]
        following = arguments[at + 1 : at + 2]
        if word == "--":
            return list(arguments[:at]), list(arguments[at + 1 :])

        if word in _WITH_VALUE or (word in with_value and not with_value[word]):
            at += 1
        elif word in with_value:
            at += any(value in with_value[word] for value in following)
        elif begins(word):
            return list(arguments[:at]), list(arguments[at:])

        at += 1

    return list(arguments), []


def add_count(parser: argparse.ArgumentParser, *flags: str, purpose: str) -> None:
    """Add a flag whose value is a number of ranks or nodes.

    Args:
        parser: the parser of the command.
        flags: the names of the flag, the short ones first.
        purpose: the help text.
    """

    def read(text: str) -> int:
        if re.fullmatch(r"0*[1-9]\d{0,8}", text) is None:
            # ConfigError instead of ArgumentTypeError, because argparse would put its own text before the
            # message.
            raise ConfigError(
                f"{flags[0]} needs a whole number of at least 1, not {text}.",
                hint=f"An example: {flags[0]} 2.",
            )

        return int(text)

    parser.add_argument(*flags, type=read, metavar=flags[-1].lstrip("-").upper(), help=purpose)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slurmddp exec`."""
    parser.usage = "slurmddp exec -n RANKS [--nodes NODES] [--] PROGRAM [argument ...]"
    add_count(
        parser,
        "-n",
        "-np",
        "--ranks",
        purpose="number of ranks on all nodes together; at most 16 per CPU, or 64",
    )
    add_count(parser, "--nodes", purpose="number of nodes; emulated outside an allocation (1)")


def run(args: argparse.Namespace) -> int:
    """Run the program as every rank; return the exit code of the first rank that fails."""
    # Imported here, so that --help does not wait for this module.
    from slurmddp.launchers.local import exec as ranks

    if not args.program:
        raise UsageError("slurmddp exec needs a program: slurmddp exec -n 4 python train.py")
    if args.ranks is None:
        raise UsageError("slurmddp exec needs a number of ranks: slurmddp exec -n 4 ...")
    return ranks.run(args.program, args.ranks, args.nodes)
