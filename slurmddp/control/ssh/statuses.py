"""Ask the login nodes, to which runs were submitted over ssh, for the status of these runs."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slurmddp.control.events import HostUnknown, Report, ignore
from slurmddp.control.listing import Listing
from slurmddp.control.ssh.runs import call
from slurmddp.environments.names import OVER_SSH_VARIABLE
from slurmddp.errors import LoginNodeError, RunNotFoundError, SlurmddpError
from slurmddp.runs import index
from slurmddp.runs.ssh_runs import SshRun, ssh_runs
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.paced_client import LONGEST_PAUSE_S, QUERY_EVERY_S

_ANSWER_S = 60
"""Seconds for which `list` waits for the answer of a host."""
Answer = Sequence[RunStatus] | str
"""The statuses of all runs on a host, or why it did not answer."""


def statuses_over_ssh(report: Report = ignore) -> list[RunStatus]:
    """Return the status of each run that was submitted over ssh, the newest activity first.

    Each host is asked once, all at the same time. Runs of a host that does not answer are unknown.

    Args:
        report: called with a `HostUnknown` for each host that does not answer.
    """
    hosts = _runs_by_host()
    if not hosts:
        return []
    shown: list[RunStatus] = []
    with ThreadPoolExecutor(len(hosts)) as threads:
        for host, answer in zip(hosts, threads.map(_ask, hosts.values()), strict=True):
            if isinstance(answer, str):
                report(HostUnknown(host, answer))
            shown += _judged(hosts[host], answer)
    return sorted(shown, key=lambda status: status.seen or status.created or 0.0, reverse=True)


def status_over_ssh(run: SshRun) -> RunStatus:
    """Return the status of a run, with its failure.

    Raises:
        LoginNodeError: the host can't be reached.
        RunNotFoundError: the run is no longer there.
    """
    same_name = call(run, named, [run.name]).runs
    if not same_name:
        raise RunNotFoundError(
            f"{run.host} has no run {run.name} any more.", hint="`slurmddp list` shows the runs that exist."
        )
    of_project = [status for status in same_name if str(status.path).startswith(f"{run.host}:{run.folder}/")]
    return (of_project or same_name)[0]


class PacedHosts:
    """The statuses of runs over ssh for a view that stays open: hosts are asked in the background.

    Each host is asked once in `QUERY_EVERY_S`, at most. While it does not answer, each pause is twice as
    long as the pause before, up to `LONGEST_PAUSE_S`, and its runs are unknown.
    """

    def __init__(
        self, runs: Sequence[SshRun] | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Show `runs`; None: all that are recorded at the time of a look."""
        self._now = now
        self._runs = runs
        self._due: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._asked: dict[str, tuple[Sequence[SshRun], Answer]] = {}
        """The runs of the last query of each host, and its answer."""
        self._asking: dict[str, threading.Thread] = {}

    def statuses(self) -> list[RunStatus]:
        """Return the statuses by the last answers, without waiting for a host; start queries that are due."""
        shown: list[RunStatus] = []
        for host, runs in _runs_by_host(self._runs).items():
            thread = self._asking.get(host)
            if (thread is None or not thread.is_alive()) and self._now() >= self._due.get(host, -math.inf):
                # A thread that waits for a host must not delay the end of the view.
                self._asking[host] = threading.Thread(target=self._query, args=(host, runs), daemon=True)
                self._due[host] = self._now() + self._pauses.get(host, QUERY_EVERY_S)
                self._asking[host].start()
            asked, answer = self._asked.get(host, ([], []))
            newer = [run for run in runs if run not in asked]
            shown += _judged([run for run in runs if run in asked], answer)
            shown += [_unknown(run, f"{host} has not answered yet") for run in newer]
        return shown

    def _query(self, host: str, runs: Sequence[SshRun]) -> None:
        answer = _ask(runs, silent=True)
        pause = self._pauses.get(host, QUERY_EVERY_S)
        self._pauses[host] = min(LONGEST_PAUSE_S, 2 * pause) if isinstance(answer, str) else QUERY_EVERY_S
        self._asked[host] = (runs, answer)


def named(names: Sequence[str]) -> Listing:
    """Return the states of the runs of this machine that have these names; the laptop asks for them."""
    wanted = frozenset(names)
    folders = [folder for folder in index.all_runs() if folder.name in wanted]
    return Listing(runs=tuple(statuses(folders, SlurmClient())))


def _runs_by_host(chosen: Sequence[SshRun] | None = None) -> dict[str, list[SshRun]]:
    hosts: dict[str, list[SshRun]] = {}
    if os.environ.get(OVER_SSH_VARIABLE):
        return hosts
    for run in ssh_runs() if chosen is None else chosen:
        if not run.is_sweep:
            hosts.setdefault(run.host, []).append(run)
    return hosts


def _ask(runs: Sequence[SshRun], *, silent: bool = False) -> Answer:
    """Return the answer of the host of `runs`; `silent`: ssh asks nothing on the terminal."""
    try:
        names = [run.name for run in runs]
        options = {"silent": silent, "quiet": True, "timeout_s": _ANSWER_S}
        return call(runs[-1], named, names, options=options).runs
    except LoginNodeError as error:
        return error.last_line or f"no answer within {_ANSWER_S} s ({error.message})"
    except (SlurmddpError, OSError) as error:
        return str(error)


def _judged(runs: Sequence[SshRun], answer: Answer) -> list[RunStatus]:
    """Return the status of runs of one host; runs that the host no longer has are left out."""
    if isinstance(answer, str):
        return [_unknown(run, f"{run.host} does not answer") for run in runs]
    names = {run.name for run in runs}
    return [status for status in answer if status.name in names]


def _unknown(run: SshRun, detail: str) -> RunStatus:
    path = Path(f"{run.host}:{run.folder}/runs/{run.name}")
    return RunStatus(name=run.name, path=path, state="unknown", detail=detail, created=run.time, active=True)
