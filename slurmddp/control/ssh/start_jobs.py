"""Start jobs from Python on the login node that their settings name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from slurmddp.control.conflicting_configs import refuse_collisions
from slurmddp.control.events import Report, ignore
from slurmddp.control.jobs import jobs_of
from slurmddp.control.json_encoding import from_json
from slurmddp.control.ssh.connection import LoginNode
from slurmddp.control.ssh.runs import pass_through, request_for, run_at
from slurmddp.control.ssh.submit import code_sent
from slurmddp.control.start import Started, start, warnings_of
from slurmddp.control.sweep import raise_if_incomplete, start_sweep
from slurmddp.runs.ssh_runs import SshRun

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def start_over_ssh(
    points: Sequence[Sequence[str]], *, is_sweep: bool = False, again: bool = False, report: Report = ignore
) -> list[SshRun] | None:
    """Send the code of this folder's project to the login node that the settings name, and start the jobs.

    Args:
        points: the typed settings of each job.
        is_sweep: whether the jobs are the runs of a sweep.
        again: whether to rename the folders of earlier runs first, so that the runs start anew.
        report: called with `CodeSent`.

    Returns:
        The runs in the order of `points`; None if the settings name no login node.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run this version; nothing was started.
        SlurmddpError: the start on the host failed. Arrays before the refused array are queued.
    """
    from slurmddp.config.composition.compose import login_node

    keys = login_node(points[0], Path.cwd())
    if keys is None:
        return None

    started, node = call_with_code(keys, start_jobs, points, is_sweep=is_sweep, again=again, report=report)
    if is_sweep:
        raise_if_incomplete(started)

    return [run_at(node, run.name) for run in started.runs]


def call_with_code(
    keys: Mapping[str, str | None],
    action: Callable[..., Result],
    *arguments: Any,
    report: Report = ignore,
    silent: bool = False,
    **keywords: Any,
) -> tuple[Result, LoginNode]:
    """Send the code of this folder's project to a login node, and call an action there that needs the code.

    Args:
        keys: the keys of the login node: `ssh`, `ssh_folder` and `python`.
        action: a function of `slurmddp.control`; the host calls the same function of its own slurmddp.
        arguments: the positional arguments of the action, plain values.
        report: called with `CodeSent`.
        silent: whether ssh must not ask for a password, even on a terminal.
        keywords: the keyword arguments of the action.

    Returns:
        The result of the action, and the login node with the folder of the project.

    Raises:
        LoginNodeError: the host can't be reached, or it can't run this version; nothing was started.
        SlurmddpError: the error that the action raised on the host.
    """
    request = request_for(action, *arguments, **keywords)
    with code_sent(keys, request, report, silent=silent) as session:
        node = session.node
        document = pass_through(session, report)[1]

    kind: type[Result] = get_type_hints(action)["return"]
    return from_json(kind, document, node.host), node


def start_jobs(points: Sequence[Sequence[str]], *, is_sweep: bool, again: bool) -> Started:
    """Start jobs on this host, to which `start_over_ssh` has sent the request and the code.

    Args:
        points: the typed settings of each job.
        is_sweep: whether the jobs are the runs of a sweep.
        again: whether to rename the folders of earlier runs first, so that the runs start anew.
    """
    jobs = jobs_of(points, report=_log)
    if is_sweep:
        return start_sweep(refuse_collisions(jobs), again=again, report=_log)
    return start(jobs[0], again=again, report=_log)


def _log(event: object) -> None:
    """Log the warnings in an event; the laptop shows the log of this host."""
    for warning in warnings_of(event):
        log.warning("%s", warning)
