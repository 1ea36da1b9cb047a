"""Declare the argument RUN, by which commands name an existing run or sweep."""

from __future__ import annotations

import argparse


def add_run(
    parser: argparse.ArgumentParser,
    name: str = "run",
    *,
    takes_sweep: bool = False,
    is_required: bool = True,
) -> None:
    """Declare an argument that names a run.

    Args:
        parser: the parser of the command.
        name: the attribute of the parsed arguments that holds the text.
        takes_sweep: whether the command also takes the name of a sweep.
        is_required: whether the argument must be given; without it, the command means the newest run.
    """
    text = "name of the run, its beginning, or the run folder"
    if takes_sweep:
        text += "; or a sweep"
    if not is_required:
        text += " (default: the newest run)"

    parser.add_argument(name, nargs=None if is_required else "?", metavar="RUN", help=text)
