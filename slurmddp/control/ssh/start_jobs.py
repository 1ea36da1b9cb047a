"""Start jobs from Python on the login node that their settings name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from slurmddp.control.events import Report, ignore
from slurmddp.control.jobs import jobs_of
from slurmddp.control.json_encoding import from_json
from slurmddp.control.refusals import refuse_collisions
from slurmddp.control.ssh.runs import pass_through, request_for, run_at
from slurmddp.control.ssh.submit import code_sent
from slurmddp.control.start import Started, start, warnings_of
from slurmddp.control.sweep import raise_if_incomplete, start_sweep
from slurmddp.runs.ssh_runs import SshRun

log = logging.getLogger(__name__)


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

    request = request_for(start_jobs, points, is_sweep=is_sweep, again=again)
    with code_sent(keys, request, report) as session:
        node = session.node
        document = pass_through(session, report)[1]

    started = from_json(Started, document, node.host)
    if is_sweep:
        raise_if_incomplete(started)

    return [run_at(node, run.name) for run in started.runs]


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
