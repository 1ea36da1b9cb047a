"""Serve tools by which a coding agent plans, starts, watches and stops runs (MCP).

slurmddp mcp                     read-only: for runs of any folder, and plans of the project in this folder
slurmddp mcp my-project --write  also with the tools that start, resume, stop and cancel runs

An agent starts this command, and talks to it on its standard input and output by the Model Context Protocol.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from slurmddp.errors import EXIT_FINISHED, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `slurmddp mcp`."""
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="the project whose configuration is planned (default: this folder)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="also offer the tools that start or change runs: submit, resume, stop, cancel, report",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the tools until standard input ends; return the exit code."""
    if not args.folder.is_dir():
        raise ConfigError(f"There is no folder {args.folder}.", hint="Name the folder of a project.")
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(
            f"slurmddp mcp needs the package mcp, which is not installed in {sys.executable}.",
            hint="Install it: pip install 'slurmddp[mcp]'.",
        )

    os.chdir(args.folder)
    # Imported here, because the package may be missing, and the tools look for the project in the folder.
    from slurmddp.mcp_server.server import serve

    serve(writes=args.write)
    return EXIT_FINISHED
