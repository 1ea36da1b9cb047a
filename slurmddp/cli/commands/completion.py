"""Print the code with which bash, zsh or fish completes commands, flags, runs, settings and choices.

eval "$(slurmddp completion bash)"        in ~/.bashrc
eval "$(slurmddp completion zsh)"         in ~/.zshrc, after compinit
slurmddp completion fish | source         in ~/.config/fish/config.fish
"""

from __future__ import annotations

import argparse

from slurmddp.cli.completion import SHELLS, script
from slurmddp.errors import EXIT_FINISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the argument of `slurmddp completion`."""
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def run(args: argparse.Namespace) -> int:
    """Print the completion code for a shell; return the exit code."""
    print(script(args.shell), end="")
    return EXIT_FINISHED
