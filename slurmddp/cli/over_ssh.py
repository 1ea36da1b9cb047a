"""Run a command on a login node over the user's own ssh, with its output and exit code.

A submission first sends the project's code. Then the same command line runs in the project's folder on the
login node. Later commands about that run use the same folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from slurmddp.cli.json_output import print_json
from slurmddp.cli.messages import print_event
from slurmddp.control.ssh import runs
from slurmddp.environments.names import OVER_SSH_VARIABLE
from slurmddp.errors import EXIT_FINISHED, UsageError
from slurmddp.runs import ssh_runs
from slurmddp.runs.ssh_runs import SshRun

_NAMES = {"list": ("sweep",), "diff": ("first", "second")}
"""The arguments that name runs, by command; an unlisted command has one such argument, `run`."""
_CHANGING = frozenset({"stop", "cancel", "rm", "resume", "rerun"})
"""Commands that continue on the login node if the connection breaks; all others end."""
_MARKER = "the-run-over-ssh"
"""Text that replaces a word before a command line is parsed, to find the argument to which the word belongs.
"""


def start(keys: dict[str, str | None], typed: Sequence[str]) -> int:
    """Send the project's code to a login node, run the command there, and return its exit code.

    Args:
        keys: the settings `ssh`, `ssh_folder` and `python` of the login node.
        typed: the whole command line, without `slurmddp`.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run this version; nothing was started.
    """
    # Imported here, because only the commands that submit a job send code.
    from slurmddp.control.ssh.submit import submit

    return submit(keys, typed, terminal=_terminal(), report=print_event)


def forward(
    name: str,
    typed: Sequence[str],
    parsed: argparse.Namespace,
    parse: Callable[[Sequence[str]], argparse.Namespace],
) -> int | None:
    """Run a command on the login node of the run that it names, and return the exit code.

    Args:
        name: the name of the command.
        typed: the whole command line, without `slurmddp`.
        parsed: the parsed arguments of the command.
        parse: parses the words after the name of the command.

    Returns:
        The exit code; None if the command runs on this machine, because it names no run over ssh.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run slurmddp.
    """
    if os.environ.get(OVER_SSH_VARIABLE) or (name == "list" and parsed.watch):
        return None

    named = _named_by_run(name, typed, parsed, parse)
    if named is None:
        return None

    run, command_line = named
    if name == "report" or (name == "open" and not parsed.folder):
        _show_report(run, opens=name == "open", as_json=name == "report" and parsed.json)
        return EXIT_FINISHED

    exit_code = runs.command(
        run, command_line, changes=name in _CHANGING, terminal=_terminal(), report=print_event
    )
    if name == "rm" and exit_code == EXIT_FINISHED:
        ssh_runs.remember(replace(run, removed=True))

    return exit_code


def _terminal() -> dict[str, str] | None:
    """Return environment variables that describe this terminal to the login node, such as TERM and COLUMNS.

    None if the output goes to no terminal.
    """
    if not sys.stdout.isatty():
        return None

    size = shutil.get_terminal_size()
    names = ("TERM", "COLORTERM", "NO_COLOR")
    variables = {name: os.environ[name] for name in names if name in os.environ}

    return {**variables, "COLUMNS": str(size.columns), "LINES": str(size.lines)}


def _named_by_run(
    name: str,
    typed: Sequence[str],
    parsed: argparse.Namespace,
    parse: Callable[[Sequence[str]], argparse.Namespace],
) -> tuple[SshRun, list[str]] | None:
    """Return the run over ssh that a command names, and the command line for the login node.

    The arguments are described at `forward`.

    Returns:
        None if the command names no run over ssh. In the command line, the full name of the run replaces the
        typed name, which may be only its beginning or missing.

    Raises:
        UsageError: the command names two runs on different machines.
    """
    keys = _NAMES.get(name, ("run",))
    names = [getattr(parsed, key) for key in keys]
    if name == "list" and names == [None]:
        return None

    named_runs = [ssh_runs.find(run_name) for run_name in names]
    known = [run for run in named_runs if run is not None]
    if not known:
        return None
    if len(known) < len(named_runs) or len({run.host for run in known}) > 1:
        raise UsageError(
            "The two runs are on different machines.",
            hint="Choose runs on one machine: the column FOLDER of `slurmddp list` begins with the host.",
        )

    command_line = list(typed)
    for key, word, run in zip(keys, names, known, strict=True):
        if word is None:
            command_line.append(run.name)
        else:
            command_line[_place(command_line, name, key, word, parse)] = run.name

    return known[-1], command_line


def _place(
    command_line: Sequence[str],
    name: str,
    key: str,
    word: str,
    parse: Callable[[Sequence[str]], argparse.Namespace],
) -> int:
    """Return the index of the value of an argument in a command line.

    The command line may hold the same word elsewhere, as the value of a flag. So each occurrence is replaced
    by a marker, until the parser returns the marker as the value of the argument.

    Args:
        command_line: the whole command line.
        name: the name of the command.
        key: the name of the argument in the parser.
        word: the value of the argument.
        parse: parses the words after the name of the command.
    """
    start = list(command_line).index(name) + 1
    places = [at for at in range(start, len(command_line)) if command_line[at] == word]
    for place in places:
        marked = [*command_line[:place], _MARKER, *command_line[place + 1 :]]
        try:
            parsed = parse([other for other in marked[start:] if other != "--debug"])
        except UsageError:
            # This occurrence is the value of a flag that takes only numbers or listed values.
            continue

        if getattr(parsed, key) == _MARKER:
            return place

    return places[0]


def _show_report(run: SshRun, *, opens: bool, as_json: bool) -> None:
    """Copy the report of a run or sweep from its login node to this machine, and print the path.

    Args:
        run: the run or sweep.
        opens: whether to open the report in a browser.
        as_json: whether to print JSON instead of the path.
    """
    from slurmddp.control.ssh.reports import fetch_report
    from slurmddp.host import browser

    reported = fetch_report(run, print_event)
    if as_json:
        print_json(reported)
    else:
        print(reported.path)

    if opens:
        browser.show(reported.path)
