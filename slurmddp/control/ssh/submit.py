"""Submit runs on a login node: send the project's code, then run the same command line there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmddp import __version__
from slurmddp.control.events import CodeSent, Report, ignore
from slurmddp.control.ssh.connection import Exchange, LoginNode, exchange
from slurmddp.control.ssh.receive_code import default_folder
from slurmddp.control.ssh.runs import pass_through
from slurmddp.control.ssh.send_code import Delivery, collect
from slurmddp.errors import LoginNodeError
from slurmddp.runs.folder import sent_code


def submit(
    keys: Mapping[str, str | None],
    command_line: Sequence[str],
    *,
    terminal: Mapping[str, str] | None = None,
    report: Report = ignore,
) -> int:
    """Send the code of this folder's project to a login node, and run a command line there that starts runs.

    The started runs are recorded on this machine, so that later commands find them.

    Args:
        keys: the keys of the login node: `ssh`, `ssh_folder` and `python`.
        command_line: the command line, without `slurmddp`.
        terminal: variables of the terminal that shows the output; None: the output is no terminal.
        report: called with `CodeSent`, and with each `HostOutput`.

    Returns:
        The exit code of the command line.

    Raises:
        LoginNodeError: the host can't be reached, has another version, or did not receive all files.
        ConfigError: the code is too large, or the folder contains the home directory.
    """
    with code_sent(keys, {"words": list(command_line), "terminal": terminal}, report) as session:
        return pass_through(session, report)[0]


@contextmanager
def code_sent(
    keys: Mapping[str, str | None], request: Mapping[str, Any], report: Report, *, silent: bool = False
) -> Iterator[Exchange]:
    """Send the code of this folder's project with a request to a login node, and yield the connection.

    Args:
        keys: the keys of the login node: `ssh`, `ssh_folder` and `python`.
        request: the keys of a request (see `serve`) for the command or action that the host runs once it has
            the code.
        report: called with `CodeSent`, and with each `HostOutput`.
        silent: whether ssh must not ask for a password, even on a terminal.
    """
    project = Path.cwd()
    delivery = collect(project)
    folder = re.sub("^~(/|$)", "", keys["ssh_folder"] or default_folder(project))
    node = LoginNode(host=keys["ssh"] or "", folder=folder, python=keys["python"])
    whole = {
        **request,
        "folder": node.folder,
        "changes": True,
        "version": __version__,
        "code": sent_code.as_json(delivery.files),
    }

    with exchange(node, whole, more_input=True, silent=silent, report=report) as session:
        if session.version != __version__:
            raise LoginNodeError(
                f"{node.host} has slurmddp {session.version}, but this machine has slurmddp {__version__}. "
                "Nothing was sent.",
                hint="Install the same version on both machines.",
            )

        _send_code(session, delivery, report)
        yield session


def _send_code(session: Exchange, delivery: Delivery, report: Report) -> None:
    """Send the contents of the files that the host asks for, and wait until it has received them.

    The absolute path of the folder on the host, which its answer contains, is stored in `session.node`.
    """
    offer = session.facts()
    files = {file.name: file for file in delivery.files}
    for name in offer["wanted"]:
        session.send(delivery.content(files[name]))

    session.end_of_input()
    session.facts()

    node = replace(session.node, folder=offer["folder"])
    session.node = node
    count = len(files) - len(delivery.record)
    report(CodeSent(node.host, node.folder, count, tuple(delivery.left_out)))
