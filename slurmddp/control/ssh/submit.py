"""Submit runs on a login node: send the project's code, then run the same command line there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurmddp import __version__
from slurmddp.control.events import CodeSent, Report, ignore
from slurmddp.control.ssh import code
from slurmddp.control.ssh.connection import Exchange, LoginNode, exchange
from slurmddp.control.ssh.runs import pass_through
from slurmddp.errors import LoginNodeError, SlurmddpError
from slurmddp.runs.folder import sent_code
from slurmddp.runs.ssh_runs import SshRun


def train(words: Sequence[str], *flags: str, report: Report = ignore) -> list[SshRun] | None:
    """Start `slurmddp train` on the login node that settings name, and return its runs.

    Args:
        words: the settings.
        flags: flags of `slurmddp train`; with `--multirun` the settings are a sweep.
        report: as for `submit`.

    Returns:
        The run, or the runs of a sweep in the order of its points; None if the settings name no login node.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run this version; nothing was started.
        SlurmddpError: slurmddp on the host did not start all runs.
    """
    from slurmddp.config.composition.compose import login_node

    if (keys := login_node(words, Path.cwd())) is None:
        return None
    exit_code, runs = submit(keys, ["train", *words, *flags], report=report)
    if exit_code or not runs:
        raise SlurmddpError(
            f"{keys['ssh']} did not start all runs (exit code {exit_code}).",
            hint="slurmddp on the host says why above.",
        )
    return runs


def submit(
    keys: Mapping[str, str | None],
    words: Sequence[str],
    *,
    terminal: Mapping[str, str] | None = None,
    report: Report = ignore,
) -> tuple[int, list[SshRun]]:
    """Send the code of the project in this folder, run a submission there, and record its runs.

    Args:
        keys: the keys of the login node: `ssh`, `ssh_folder` and `python`.
        words: the command line, without `slurmddp`.
        terminal: variables of the terminal that shows the output; None: it is no terminal.
        report: called with `CodeSent`, and with each `HostOutput`.

    Returns:
        The exit code, and the runs, those of a sweep in the order of its points.

    Raises:
        LoginNodeError: the host can't be reached, has another version, or did not get all files.
        ConfigError: the code is too large, or the folder is no project.
    """
    project = Path.cwd()
    delivery = code.collect(project)
    folder = re.sub("^~(/|$)", "", keys["ssh_folder"] or code.default_folder(project))
    node = LoginNode(host=keys["ssh"] or "", folder=folder, python=keys["python"])
    request = {
        "folder": node.folder,
        "words": list(words),
        "terminal": terminal,
        "changes": True,
        "version": __version__,
        "code": sent_code.as_json(delivery.files),
    }
    with exchange(node, request, more_input=True, report=report) as session:
        if session.version != __version__:
            raise LoginNodeError(
                f"{node.host} has slurmddp {session.version}, this machine slurmddp {__version__}. "
                "Nothing was sent.",
                hint="Install the same version on both.",
            )
        node = _send_code(session, delivery, report)
        return pass_through(session, report, node)


def _send_code(session: Exchange, delivery: code.Delivery, report: Report) -> LoginNode:
    """Send the contents that the host lacks; return the node with the folder as an absolute path."""
    offer = session.facts()
    files = {file.name: file for file in delivery.files}
    for name in offer["wanted"]:
        session.send(delivery.content(files[name]))
    session.end_of_input()
    session.facts()

    node = replace(session.node, folder=offer["folder"])
    count = len(files) - len(delivery.record)
    report(CodeSent(node.host, node.folder, count, tuple(delivery.left_out)))
    return node
