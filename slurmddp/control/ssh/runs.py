"""Act on runs that were submitted over ssh: each call is one exchange with their login node."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from slurmddp import __version__
from slurmddp.control.contract import from_json
from slurmddp.control.events import HostOutput, Report, ignore
from slurmddp.control.listing import Listing
from slurmddp.control.ssh.connection import Exchange, HostRefusal, LoginNode, exchange
from slurmddp.errors import SlurmddpError
from slurmddp.runs import ssh_runs
from slurmddp.runs.ssh_runs import SshRun
from slurmddp.runs.status.run_status import RunStatus

Result = TypeVar("Result")


def node_of(run: SshRun) -> LoginNode:
    """Return the place where commands about a run run."""
    return LoginNode(host=run.host, folder=run.folder, python=run.python)


def command(
    run: SshRun,
    words: Sequence[str],
    *,
    changes: bool = False,
    terminal: Mapping[str, str] | None = None,
    report: Report = ignore,
) -> int:
    """Run a command line on the host of a run, and return its exit code.

    Args:
        run: the run.
        words: the command line, without `slurmddp`.
        changes: whether the command starts runs, so that it goes on if the connection breaks.
        terminal: variables of the terminal that shows the output; None: it is no terminal.
        report: called with each `HostOutput`.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run slurmddp.
    """
    request = {"folder": run.folder, "words": list(words), "terminal": terminal, "changes": changes}
    with exchange(node_of(run), request, report=report) as session:
        return pass_through(session, report)[0]


def pass_through(
    session: Exchange, report: Report, node: LoginNode | None = None
) -> tuple[int, list[SshRun]]:
    """Report the output of a command on a host, and record the runs that it starts.

    Args:
        session: the exchange.
        report: called with each `HostOutput`.
        node: the node with the folder as an absolute path; None: the exchange's.

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
            report(HostOutput(line))
        elif facts["sweep"]:
            sweep = facts["sweep"]
            points = facts["started"]
        elif facts["started"]:
            names.update(dict.fromkeys(facts["started"]))
            # The sweep comes last: it is what a command without a name means.
            ssh_runs.remember(*map(run, facts["started"]), *([run(sweep, is_sweep=True)] if sweep else []))
    exit_code = session.exit_code()
    return exit_code, [run(name) for name in (points or names)]


def answer(run: SshRun, *arguments: str) -> str:
    """Run slurmddp on the host of a run, and return its output.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run slurmddp.
        SlurmddpError: the command failed.
    """
    request = {"folder": run.folder, "words": list(arguments)}
    with exchange(node_of(run), request) as session:
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


def status(run: SshRun) -> RunStatus:
    """Return the status of a run, with its failure.

    Raises:
        LoginNodeError: the host can't be reached.
        SlurmddpError: the run is no longer there.
    """
    return result(run, RunStatus, "status", run.name)


def runs_of_sweep(sweep: SshRun) -> list[SshRun]:
    """Ask the host of a sweep for its runs.

    Raises:
        LoginNodeError: the host can't be reached.
        SlurmddpError: the sweep is no longer there.
    """
    listing = result(sweep, Listing, "list", sweep.name)
    return [replace(sweep, name=run.name, is_sweep=False) for run in listing.runs]


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
    with exchange(node_of(run), request) as session:
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
