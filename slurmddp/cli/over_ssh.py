"""Run a command on a login node, by the user's own ssh, and pass its output and exit code through.

A submission first sends the project's code. Then the same command line runs in the project's folder on the
login node. Commands about that run later run in the same folder.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote

from slurmddp import __version__
from slurmddp.cli.messages import UsageError
from slurmddp.control.contract import from_json
from slurmddp.control.ssh import code
from slurmddp.control.ssh.connection import Exchange, HostRefusal, LoginNode, exchange, terminal
from slurmddp.environments.names import OVER_SSH_VARIABLE
from slurmddp.errors import EXIT_FINISHED, LoginNodeError, SlurmddpError
from slurmddp.host import browser
from slurmddp.runs import ssh_runs
from slurmddp.runs.folder import sent_code
from slurmddp.runs.folder.layout import REPORT_FILE
from slurmddp.runs.ssh_runs import SshRun
from slurmddp.runs.text_format import counted

Result = TypeVar("Result")

_NAMES = {"list": ("sweep",), "diff": ("first", "second")}
"""The arguments that name runs, where it is not `run` alone."""
_MARKER = "the-run-over-ssh"
"""Takes the place of a word while the command line is parsed, to see which argument the word is."""
_NOTED = 5
"""Names of files that stay on this machine, as many as a note shows."""


def start(keys: dict[str, str | None], typed: Sequence[str]) -> int:
    """Run a submission on the login node of its settings, and return the exit code.

    Args:
        keys: the keys of the login node.
        typed: the whole command line, without `slurmddp`.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run this version; nothing was started.
    """
    return _submit(keys, typed)[0]


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
        return _fetch_report(run, show=name == "open")

    changes = name in ("resume", "rerun")
    with exchange(_node(run), _request(run, command_line, changes=changes)) as session:
        exit_code = _pass_through(session)[0]
    if name == "rm" and exit_code == EXIT_FINISHED:
        ssh_runs.remember(replace(run, removed=True))
    return exit_code


def submit(words: Sequence[str], *flags: str) -> list[SshRun] | None:
    """Start `slurmddp train` on the login node that settings name, and return its runs.

    Args:
        words: the settings.
        flags: flags of `slurmddp train`; with `--multirun` the settings are a sweep.

    Returns:
        The run, or the runs of a sweep in the order of its points; None if the settings name no login node.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run this version; nothing was started.
        SlurmddpError: slurmddp on the host did not start all runs.
    """
    from slurmddp.config.composition.compose import login_node

    if (keys := login_node(words, Path.cwd())) is None:
        return None
    exit_code, runs = _submit(keys, ["train", *words, *flags])
    if exit_code or not runs:
        raise SlurmddpError(
            f"{keys['ssh']} did not start all runs (exit code {exit_code}).",
            hint="slurmddp on the host says why above.",
        )
    return runs


def answer(run: SshRun, *arguments: str) -> str:
    """Run slurmddp on the host of a run, and return its output.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run slurmddp.
        SlurmddpError: the command failed.
    """
    with exchange(_node(run), _request(run, arguments, shown=False)) as session:
        output = "".join(line for line, _ in session.lines())
        exit_code = session.exit_code()
    if exit_code:
        raise SlurmddpError(
            f"`slurmddp {shlex.join(arguments)}` failed on {run.host} (exit code {exit_code}).",
            hint="slurmddp on the host says why above.",
        )
    return output


def result(run: SshRun, kind: type[Result], *arguments: str) -> Result:
    """Run an action on the host of a run, and return its result.

    Args:
        run: the run.
        kind: the dataclass of the result.
        arguments: the words of the command, without `--json`.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run slurmddp.
        SlurmddpError: the action failed, or its result can't be read.
    """
    output = answer(run, *arguments, "--json")
    try:
        return from_json(kind, json.loads(output), run.host)
    except ValueError as error:
        raise SlurmddpError(
            f"What {run.host} prints for `slurmddp {shlex.join(arguments)} --json` can't be read: {error}.",
            hint=f"Install slurmddp {__version__} there as well.",
        ) from error


def own_files(run: SshRun, paths: Sequence[str], *, unshared: bool = False) -> list[bytes | None]:
    """Return the contents of files of this account on the host of a run; None for a file that is missing.

    Args:
        run: the run.
        paths: absolute paths.
        unshared: whether to refuse files to which other accounts can write.

    Raises:
        LoginNodeError: the host can't be reached, or the connection broke before all bytes had arrived.
        SlurmddpError: a file can't be read, or another account owns it.
    """
    request = {"folder": run.folder, "files": list(paths), "unshared": unshared}
    with exchange(_node(run), request) as session:
        try:
            sizes = session.facts()["sizes"]
        except HostRefusal as refusal:
            raise SlurmddpError(
                f"{run.host} can't read {', '.join(paths)} (exit code {refusal.code}).",
                hint="slurmddp on the host says why above.",
            ) from refusal
        contents = [None if size is None else session.read(size) for size in sizes]
        session.exit_code()
        return contents


def _node(run: SshRun) -> LoginNode:
    return LoginNode(host=run.host, folder=run.folder, python=run.python)


def _request(
    run: SshRun, command_line: Sequence[str], *, changes: bool = False, shown: bool = True
) -> dict[str, Any]:
    """Return the request for a command about a run, whose output may be shown on this terminal."""
    screen = terminal() if shown else None
    return {"folder": run.folder, "words": list(command_line), "terminal": screen, "changes": changes}


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
    runs = [run for run in named if run is not None]
    if not runs:
        return None
    if len(runs) < len(named) or len({run.host for run in runs}) > 1:
        raise UsageError("The two runs lie on different machines.", hint="Compare runs of one cluster.")

    command_line = list(typed)
    for key, word, run in zip(keys, given, runs, strict=True):
        if word is None:
            command_line.append(run.name)
        else:
            command_line[_place(command_line, name, key, word, parse)] = run.name
    return runs[-1], command_line


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


def _submit(keys: dict[str, str | None], typed: Sequence[str]) -> tuple[int, list[SshRun]]:
    """Send the code of the project in this folder, run a submission there, and record its runs.

    Returns:
        The exit code, and the runs, those of a sweep in the order of its points.

    Raises:
        LoginNodeError: the host can't be reached, has another version, or did not get all files.
        ConfigError: the code is too large, or the folder is no project.
    """
    project = Path.cwd()
    delivery = code.collect(project)
    folder = re.sub(r"^~(/|$)", "", keys["ssh_folder"] or code.default_folder(project))
    node = LoginNode(host=keys["ssh"] or "", folder=folder, python=keys["python"])
    request = {
        "folder": node.folder,
        "words": list(typed),
        "terminal": terminal(),
        "changes": True,
        "version": __version__,
        "code": sent_code.as_json(delivery.files),
        "adopted": ssh_runs.sent_files(node.host, node.folder),
    }
    with exchange(node, request, more_input=True) as session:
        if session.version != __version__:
            raise LoginNodeError(
                f"{node.host} has slurmddp {session.version}, this machine slurmddp {__version__}. "
                "Nothing was sent.",
                hint="Install the same version on both.",
            )
        try:
            node = _send_code(session, delivery)
        except HostRefusal as refusal:
            return refusal.code, []
        return _pass_through(session, node)


def _send_code(session: Exchange, delivery: code.Delivery) -> LoginNode:
    """Send the contents that the host lacks; return the node with the folder as an absolute path."""
    offer = session.facts()
    files = {file.name: file for file in delivery.files}
    for name in offer["wanted"]:
        session.send(delivery.content(files[name]))
    session.end_of_input()
    session.facts()

    node = replace(session.node, folder=offer["folder"])
    count = counted(len(files) - len(delivery.record), "file")
    print(f"code    {node.host}:{node.folder}  ({count})", file=sys.stderr, flush=True)
    if delivery.left_out:
        more = len(delivery.left_out) - _NOTED
        names = ", ".join(delivery.left_out[:_NOTED]) + (f" and {more} more" if more > 0 else "")
        print(f"note    not sent, may hold passwords or keys: {names}", file=sys.stderr, flush=True)
    return node


def _pass_through(session: Exchange, node: LoginNode | None = None) -> tuple[int, list[SshRun]]:
    """Print the output of a command on the host, and record the runs that it reports as started.

    Returns:
        The exit code, and the runs, those of a sweep in the order of its points.
    """
    place = node or session.node
    names: dict[str, None] = {}
    points: list[str] = []
    sweep = None

    def run(name: str, *, is_sweep: bool = False) -> SshRun:
        return SshRun(name=name, host=place.host, folder=place.folder, python=place.python, is_sweep=is_sweep)

    for line, facts in session.lines():
        if facts is None:
            print(line, end="", flush=True)
        elif facts["sweep"]:
            sweep, points = facts["sweep"], facts["started"]
        elif facts["started"]:
            names.update(dict.fromkeys(facts["started"]))
            # The sweep comes last: it is what a command without a name means.
            ssh_runs.remember(*map(run, facts["started"]), *([run(sweep, is_sweep=True)] if sweep else []))
    exit_code = session.exit_code()
    return exit_code, [run(name) for name in (points or names)]


def _fetch_report(run: SshRun, *, show: bool) -> int:
    """Let the host write the report of a run or sweep, copy it here, print its path and open it.

    The page of a sweep links to the reports of its runs, so these are copied too.
    """
    with exchange(_node(run), _request(run, ["report", run.name], shown=False)) as session:
        paths = [line.strip() for line, _ in session.lines() if line.startswith("/")]
        exit_code = session.exit_code()
    for path in paths:
        page = PurePosixPath(path)
        is_sweep = page.name != REPORT_FILE
        runs = page.parent if is_sweep else page.parent.parent
        name = str(page.relative_to(runs))
        (copy,) = _copies(run, runs, [name])
        if is_sweep:
            _copies(run, runs, _linked_reports(copy.read_text(encoding="utf-8")))
        print(copy)
        if show:
            browser.show(copy)
    return exit_code


def _copies(run: SshRun, folder: PurePosixPath, names: Sequence[str]) -> list[Path]:
    """Copy files below a folder on the host to this machine, readable by this account alone."""
    reports = ssh_runs.records_file().parent / "reports"
    reports.mkdir(mode=0o700, parents=True, exist_ok=True)
    reports.chmod(0o700)
    copies = [reports / run.host / name for name in names]
    contents = own_files(run, [str(folder / name) for name in names]) if names else []
    for copy, name, content in zip(copies, names, contents, strict=True):
        if content is None:
            raise SlurmddpError(f"There is no report {run.host}:{folder / name} of this account.")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return copies


def _linked_reports(page: str) -> list[str]:
    """Return the reports of runs to which the page of a sweep links, as paths beside it."""
    links = re.findall(rf'href="([^"/]+)/{re.escape(REPORT_FILE)}"', page)
    names = [unquote(html.unescape(link)) for link in links]
    return [f"{name}/{REPORT_FILE}" for name in names if name not in (".", "..") and "/" not in name]
