"""Read the status of runs that were submitted over ssh, from their login nodes."""

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
"""Seconds to wait for the answer of a host."""

Answer = Sequence[RunStatus] | str
"""The statuses of the runs on a host, or the reason why the host did not answer."""


def statuses_over_ssh(report: Report = ignore) -> list[RunStatus]:
    """Return the status of each run that was submitted over ssh, the most recently active first.

    Each host is queried once, and all hosts at the same time. Runs on a host that does not answer have the
    state unknown.

    Args:
        report: called with a `HostUnknown` for each host that does not answer.
    """
    hosts = _runs_by_host()
    if not hosts:
        return []

    all_statuses: list[RunStatus] = []
    with ThreadPoolExecutor(len(hosts)) as threads:
        for host, answer in zip(hosts, threads.map(_ask, hosts.values()), strict=True):
            if isinstance(answer, str):
                report(HostUnknown(host, answer))
            all_statuses += _statuses(hosts[host], answer)

    return sorted(all_statuses, key=lambda status: status.seen or status.created or 0.0, reverse=True)


def status_over_ssh(run: SshRun) -> RunStatus:
    """Query the host of a run, and return the status of the run.

    Raises:
        LoginNodeError: the host can't be reached.
        RunNotFoundError: the host has no run with this name any more.
    """
    same_name = call(run, named, [run.name]).runs
    if not same_name:
        raise RunNotFoundError(
            f"{run.host} has no run {run.name} any more.", hint="`slurmddp list` lists existing runs."
        )

    of_project = [status for status in same_name if str(status.path).startswith(f"{run.host}:{run.folder}/")]
    return (of_project or same_name)[0]


class PacedHosts:
    """The statuses of runs over ssh for a display that is refreshed; threads query the hosts.

    A host is queried at most once in `QUERY_EVERY_S` seconds. While it does not answer, its runs have the
    state unknown, and the pause between two queries doubles each time, up to `LONGEST_PAUSE_S` seconds.

    Args:
        runs: the runs; None: all runs over ssh that are recorded at the time of a call.
        now: returns the time in seconds since any fixed moment.
    """

    def __init__(
        self, runs: Sequence[SshRun] | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._runs = runs
        self._due: dict[str, float] = {}
        """Time of the next query of each host, in seconds of the clock `now`."""
        self._pauses: dict[str, float] = {}
        self._answers: dict[str, tuple[Sequence[SshRun], Answer]] = {}
        """For each host, the runs of the last query, and the host's answer."""
        self._queries: dict[str, threading.Thread] = {}

    def statuses(self) -> list[RunStatus]:
        """Return the statuses from the last answer of each host, and start the queries that are due.

        The call does not wait for the queries. Runs for which no host has answered yet have the state
        unknown.
        """
        all_statuses: list[RunStatus] = []
        for host, runs in _runs_by_host(self._runs).items():
            query = self._queries.get(host)
            if (query is None or not query.is_alive()) and self._now() >= self._due.get(host, -math.inf):
                # A daemon thread, because Python waits for other threads at its exit, and a slow host would
                # delay it.
                self._queries[host] = threading.Thread(target=self._query, args=(host, runs), daemon=True)
                self._due[host] = self._now() + self._pauses.get(host, QUERY_EVERY_S)
                self._queries[host].start()

            queried_runs, answer = self._answers.get(host, ([], []))
            newer_runs = [run for run in runs if run not in queried_runs]
            all_statuses += _statuses([run for run in runs if run in queried_runs], answer)
            all_statuses += [_unknown(run, f"{host} has not answered yet") for run in newer_runs]

        return all_statuses

    def _query(self, host: str, runs: Sequence[SshRun]) -> None:
        answer = _ask(runs, silent=True)
        if isinstance(answer, str):
            self._pauses[host] = min(LONGEST_PAUSE_S, 2 * self._pauses.get(host, QUERY_EVERY_S))
        else:
            self._pauses[host] = QUERY_EVERY_S
        self._answers[host] = (runs, answer)


def named(names: Sequence[str]) -> Listing:
    """Return the statuses of the runs on this machine with these names; called over ssh from laptops."""
    all_names = frozenset(names)
    folders = [folder for folder in index.all_runs() if folder.name in all_names]
    return Listing(runs=tuple(statuses(folders, SlurmClient())))


def _runs_by_host(chosen: Sequence[SshRun] | None = None) -> dict[str, list[SshRun]]:
    """Group runs over ssh by host, without sweeps.

    Args:
        chosen: the runs; None: all recorded runs over ssh.
    """
    hosts: dict[str, list[SshRun]] = {}
    # A command that a laptop runs here over ssh must list only the runs of this machine, not runs that were
    # submitted from here to other hosts.
    if os.environ.get(OVER_SSH_VARIABLE):
        return hosts

    for run in ssh_runs() if chosen is None else chosen:
        if not run.is_sweep:
            hosts.setdefault(run.host, []).append(run)

    return hosts


def _ask(runs: Sequence[SshRun], *, silent: bool = False) -> Answer:
    """Query a host for the statuses of its runs; if it does not answer, return the reason as a text.

    Args:
        runs: runs that were submitted to the same host.
        silent: whether ssh must not ask for a password, even on a terminal.
    """
    try:
        names = [run.name for run in runs]
        options = {"silent": silent, "quiet": True, "timeout_s": _ANSWER_S}
        return call(runs[-1], named, names, options=options).runs
    except LoginNodeError as error:
        return error.last_line or f"no answer within {_ANSWER_S} s ({error.message})"
    except (SlurmddpError, OSError) as error:
        return str(error)


def _statuses(runs: Sequence[SshRun], answer: Answer) -> list[RunStatus]:
    """Return the statuses of a host's runs by its answer.

    Runs that do not exist on the host any more are left out. If the host has not answered, the state of all
    runs is unknown.
    """
    if isinstance(answer, str):
        return [_unknown(run, f"{run.host} does not answer") for run in runs]

    names = {run.name for run in runs}
    return [status for status in answer if status.name in names]


def _unknown(run: SshRun, detail: str) -> RunStatus:
    path = Path(f"{run.host}:{run.folder}/runs/{run.name}")
    return RunStatus(name=run.name, path=path, state="unknown", detail=detail, created=run.time, active=True)
