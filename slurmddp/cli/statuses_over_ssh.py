"""Ask the login nodes, to which runs were submitted over ssh, for the status of these runs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

from slurmddp.cli.over_ssh import LoginNode
from slurmddp.environments.names import OVER_SSH_VARIABLE
from slurmddp.errors import EXIT_FINISHED
from slurmddp.runs.ssh_runs import SshRun, ssh_runs
from slurmddp.runs.status.run_status import RunStatus

_ANSWER_S = 60
"""Seconds for which `list` waits for the answer of a host."""


def statuses_there() -> list[RunStatus]:
    """Return the status of each run that was submitted over ssh, the newest activity first.

    Each host is asked once, all at the same time. Runs of a host that does not answer are unknown.
    """
    if os.environ.get(OVER_SSH_VARIABLE):
        return []
    hosts: dict[str, list[SshRun]] = {}
    for run in (one for one in ssh_runs() if not one.is_sweep):
        hosts.setdefault(run.host, []).append(run)
    if not hosts:
        return []
    with ThreadPoolExecutor(len(hosts)) as threads:
        found = [one for asked in threads.map(_statuses_of, hosts.values()) for one in asked]
    return sorted(found, key=lambda one: one.seen or one.created or 0.0, reverse=True)


def _statuses_of(runs: Sequence[SshRun]) -> list[RunStatus]:
    """Return the status of the runs of one host; runs that the host no longer has are left out."""
    newest = runs[-1]
    node = LoginNode(host=newest.host, folder=newest.folder, python=newest.python)
    command = node.ssh(node.line(["list", "--all", "--json"]))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=False
        )
        words = done.stderr.decode(errors="replace").strip().splitlines()
        answer = json.loads(done.stdout) if done.returncode == EXIT_FINISHED else None
        trouble = "" if answer is not None else words[-1] if words else f"exit code {done.returncode}"
    except (subprocess.TimeoutExpired, ValueError) as error:
        answer, trouble = None, f"{type(error).__name__} after `{shlex.join(command[:-1])}`"
    if answer is None:
        print(f"slurmddp: {node.host} does not answer: {trouble}", file=sys.stderr)
        detail = f"{node.host} does not answer"
        return [
            RunStatus(
                name=run.name, path=Path(f"{run.host}:{run.folder}/runs/{run.name}"), state="unknown",
                detail=detail, created=run.time, active=True,
            )
            for run in runs
        ]  # fmt: skip
    names = {run.name for run in runs}
    return [_status(node.host, one) for one in answer if one["name"] in names]


def _status(host: str, facts: dict[str, Any]) -> RunStatus:
    """Return the status that a host has printed as JSON."""
    plain = {one.name for one in fields(RunStatus)} - {"failure", "restarted", "log", "report"}
    known = {key: value for key, value in facts.items() if key in plain}
    return RunStatus(**{**known, "path": Path(f"{host}:{facts['path']}")})
