"""Run commands and actions on the login node of runs that were submitted over ssh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from slurmddp import __version__
from slurmddp.control.events import HostOutput, Report, ignore
from slurmddp.control.json_encoding import from_json
from slurmddp.control.listing import list_runs
from slurmddp.control.ssh.connection import Exchange, LoginNode, exchange
from slurmddp.errors import LoginNodeError
from slurmddp.runs import ssh_runs
from slurmddp.runs.ssh_runs import SshRun

Result = TypeVar("Result")


def node_of(run: SshRun) -> LoginNode:
    """Return the login node on which a run was submitted, with the run's project folder and interpreter."""
    return LoginNode(host=run.host, folder=run.folder, python=run.python)


def command(
    run: SshRun,
    command_line: Sequence[str],
    *,
    changes: bool = False,
    terminal: Mapping[str, str] | None = None,
    report: Report = ignore,
) -> int:
    """Run a slurmddp command line on the host of a run, and return its exit code.

    Args:
        run: the run or sweep.
        command_line: the command line, without `slurmddp`.
        changes: whether the command starts or changes runs, so that it continues if the connection breaks.
        terminal: variables of the terminal that shows the output; None: the output is no terminal.
        report: called with each `HostOutput`.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run slurmddp.
    """
    request = {
        "folder": run.folder,
        "words": list(command_line),
        "terminal": terminal,
        "changes": changes,
    }
    with exchange(node_of(run), request, report=report) as session:
        return pass_through(session, report)[0]


def run_at(node: LoginNode, name: str, *, is_sweep: bool = False) -> SshRun:
    """Return the record of a run or a sweep on a login node, by which later commands find it."""
    return SshRun(name=name, host=node.host, folder=node.folder, python=node.python, is_sweep=is_sweep)


def pass_through(session: Exchange, report: Report) -> tuple[int, dict[str, Any]]:
    """Report the output of a command on a host until its end, and record the runs that it starts.

    Args:
        session: the connection to the host.
        report: called with each `HostOutput`.

    Returns:
        The exit code; and, if the request calls an action, the JSON document of its result, else an empty
        dictionary.
    """
    document: dict[str, Any] = {}
    sweeps: list[SshRun] = []
    for line, facts in session.lines():
        if facts is None:
            report(HostOutput(line))
        elif "result" in facts:
            document = facts["result"]
        elif facts["sweep"]:
            sweeps = [run_at(session.node, facts["sweep"], is_sweep=True)]
        elif facts["started"]:
            # Commands without a name mean the newest record. After the start of a sweep they mean the sweep,
            # so it is recorded last.
            ssh_runs.remember(*(run_at(session.node, name) for name in facts["started"]), *sweeps)

    return session.exit_code(), document


def request_for(action: Callable[..., Any], *arguments: Any, **keywords: Any) -> dict[str, Any]:
    """Return a request (see `serve`) that calls a function of `slurmddp.control` on the host."""
    path = f"{action.__module__}.{action.__qualname__}"
    return {"action": path, "arguments": arguments, "keywords": keywords}


def call(
    run: SshRun,
    action: Callable[..., Result],
    *arguments: Any,
    changes: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
    **keywords: Any,
) -> Result:
    """Call an action of `slurmddp.control` on the host of a run, and return its result.

    Args:
        run: the run.
        action: a function of `slurmddp.control`; the host calls the same function of its own slurmddp.
        arguments: the positional arguments of the action, plain values.
        changes: whether the action continues if the connection breaks.
        options: further arguments of `exchange`.
        keywords: the keyword arguments of the action.

    Raises:
        LoginNodeError: the host can't be reached, it can't run slurmddp, or its result can't be read.
        SlurmddpError: the error that the action raised on the host.

    Example:
        stopped = call(run, stop, run.name, changes=True)
    """
    request = {"folder": run.folder, "changes": changes, **request_for(action, *arguments, **keywords)}
    with exchange(node_of(run), request, **options) as session:
        document = session.facts()["result"]
        session.exit_code()

    kind: type[Result] = get_type_hints(action)["return"]
    try:
        return from_json(kind, document, run.host)
    except ValueError as error:
        raise LoginNodeError(
            f"The result of {action.__name__} on {run.host} can't be read: {error}.",
            hint=f"{run.host} has slurmddp {session.version}: install slurmddp {__version__} on it.",
        ) from error


def runs_of_sweep(sweep: SshRun) -> list[SshRun]:
    """Query the host of a sweep for its runs, and return their records.

    Raises:
        LoginNodeError: the host can't be reached.
        SlurmddpError: the sweep does not exist any more.
    """
    listing = call(sweep, list_runs, sweep.name)
    return [replace(sweep, name=run.name, is_sweep=False) for run in listing.runs]


def own_files(run: SshRun, paths: Sequence[str], *, unshared: bool = False) -> list[bytes | None]:
    """Read files of this account on the host of a run, and return their contents; None for a missing file.

    Args:
        run: the run.
        paths: absolute paths on the host.
        unshared: whether to refuse files that other accounts can change.

    Raises:
        LoginNodeError: the host can't be reached, or the connection broke before all bytes had arrived.
        ConfigError: another account owns a file; or can change it, and `unshared` is true.
        SlurmddpError: a file can't be read.
    """
    request = {"folder": run.folder, "files": list(paths), "unshared": unshared}
    with exchange(node_of(run), request) as session:
        sizes = session.facts()["sizes"]
        contents = [None if size is None else session.read(size) for size in sizes]
        session.exit_code()
        return contents
