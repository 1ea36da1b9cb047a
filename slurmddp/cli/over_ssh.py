"""Run a command on a login node, by the user's own ssh, and pass its output and exit code through.

A submission first sends the project's code. Then the same command line runs in the project's folder on the
login node. Commands about that run later run in the same folder.
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
"""The arguments that name runs, where it is not `run` alone."""
_CHANGING = frozenset({"stop", "cancel", "rm", "resume", "rerun"})
"""Commands that go on if the connection breaks; the others end."""
_MARKER = "the-run-over-ssh"
"""Takes the place of a word while the command line is parsed, to see which argument the word is."""


def start(keys: dict[str, str | None], typed: Sequence[str]) -> int:
    """Run a submission on the login node of its settings, and return the exit code.

    Args:
        keys: the keys of the login node.
        typed: the whole command line, without `slurmddp`.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run this version; nothing was started.
    """
    from slurmddp.control.ssh.submit import submit  # Only a submission sends code.

    return submit(keys, typed, terminal=_terminal(), report=print_event)


def forward(
    name: str,
    typed: Sequence[str],
    parsed: argparse.Namespace,
    parse: Callable[[Sequence[str]], argparse.Namespace],
) -> int | None:
    """Run a command about a run on the login node of the run, and return the exit code.

    Args:
        name: the command.
        typed: the whole command line, without `slurmddp`.
        parsed: its parsed words for slurmddp.
        parse: parses the words after the command.

    Returns:
        The exit code of the command there; None if the command belongs to this machine.

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
    """Return what the host has to know of this terminal; None if the output does not go to one."""
    if not sys.stdout.isatty():
        return None
    size = shutil.get_terminal_size()
    names = ("TERM", "COLORTERM", "NO_COLOR")
    shown = {name: os.environ[name] for name in names if name in os.environ}
    return {**shown, "COLUMNS": str(size.columns), "LINES": str(size.lines)}


def _named_by_run(
    name: str,
    typed: Sequence[str],
    parsed: argparse.Namespace,
    parse: Callable[[Sequence[str]], argparse.Namespace],
) -> tuple[SshRun, list[str]] | None:
    """Return the run over ssh that a command is about, and its words with the whole name; None if none is."""
    keys = _NAMES.get(name, ("run",))
    given = [getattr(parsed, key) for key in keys]
    if name == "list" and given == [None]:
        return None
    named = [ssh_runs.find(word) for word in given]
    known = [run for run in named if run is not None]
    if not known:
        return None
    if len(known) < len(named) or len({run.host for run in known}) > 1:
        raise UsageError("The two runs lie on different machines.", hint="Compare runs of one cluster.")

    command_line = list(typed)
    for key, word, run in zip(keys, given, known, strict=True):
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
    """Return the place of an argument's value among words that may hold the same word elsewhere."""
    start = list(command_line).index(name) + 1
    places = [at for at in range(start, len(command_line)) if command_line[at] == word]
    for place in places:
        marked = [*command_line[:place], _MARKER, *command_line[place + 1 :]]
        try:
            parsed = parse([other for other in marked[start:] if other != "--debug"])
        except UsageError:  # The word is the value of a flag with choices, or of a number.
            continue
        if getattr(parsed, key) == _MARKER:
            return place
    return places[0]


def _show_report(run: SshRun, *, opens: bool, as_json: bool) -> None:
    """Copy the report of a run or a sweep here, print its path or its document, and open it if asked to."""
    from slurmddp.control.ssh.reports import fetch_report
    from slurmddp.host import browser

    reported = fetch_report(run, print_event)
    if as_json:
        print_json(reported)
    else:
        print(reported.path)
    if opens:
        browser.show(reported.path)
