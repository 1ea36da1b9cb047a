"""Watch srun, and end it if it waits for agents that have exited, or that SLURM could not start.

If a network link was cut, SLURM may be unable to report to srun that agents have exited. The watch also ends
the srun of an attempt once a later attempt has begun: this srun would cancel its step by id, and the step of
the later attempt has the same id.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slurmddp.batch.attempt import Attempt
from slurmddp.batch.launch_failure import launch_failure, record
from slurmddp.batch.slurm_job import hosts_of
from slurmddp.environments.names import KILL_WAIT_VARIABLE

_TICK_S = 2.0
"""Seconds from one check of srun to the next."""
_LEFT_S = 60.0
"""Seconds that srun may take to end after all agents have recorded their exit codes."""
_SILENT_S = 1200.0
"""Seconds that srun may take to end if an agent without an exit code may still write a checkpoint."""
_LAUNCH_TICKS = 300
"""The number of checks for a failed launch (ten minutes); srun reports a failed launch within minutes."""
_KILL_WAIT_S = 30
"""The default of SLURM's KillWait, in seconds."""


def watch(attempt: Attempt, environ: Mapping[str, str]) -> None:
    """Read a process id from stdin, and watch the srun of this subshell until it ends or stdin is closed."""
    kill_wait = environ.get(KILL_WAIT_VARIABLE, "")
    srun = SrunWatch(
        attempt,
        kill_wait_s=int(kill_wait) if kill_wait.isdigit() else _KILL_WAIT_S,
        hosts=hosts_of(environ.get("SLURM_JOB_NODELIST", "")),
    )
    signal.signal(signal.SIGTERM, srun.note_end)

    line = sys.stdin.readline().strip()
    if line.isdigit():
        srun.run(int(line), lambda: bool(select.select([sys.stdin], [], [], _TICK_S)[0]))


class SrunWatch:
    """Watches one srun process, and ends it when it waits for agents that have exited or never started."""

    def __init__(self, attempt: Attempt, *, kill_wait_s: float, hosts: Sequence[str]) -> None:
        """Prepare the watch.

        Args:
            attempt: the attempt whose ranks srun runs.
            kill_wait_s: the seconds between SIGTERM and SIGKILL when SLURM ends a job (KillWait).
            hosts: the hosts of the agents, by node index.
        """
        self._attempt = attempt
        self._kill_wait_s = kill_wait_s
        self._hosts = hosts
        self._is_ending = False
        self._launch_ticks = _LAUNCH_TICKS

    def note_end(self, _number: int, _frame: object) -> None:
        """Handle SIGTERM: record that SLURM is ending the job, which shortens the limit of `_limit_s`."""
        self._is_ending = True

    def run(self, pid: int, has_ended: Callable[[], bool]) -> None:
        """Check srun every two seconds until it ends, and end it early if it waits in vain.

        End srun if a later attempt has begun, if SLURM could not start an agent, or if srun has not ended
        within `_limit_s()` seconds after the agent of node 0 has exited.

        Args:
            pid: the process id of the subshell that runs srun.
            has_ended: waits two seconds at most for the end of srun; returns whether srun has ended.
        """
        attempt = self._attempt
        waited_s = 0.0
        while not has_ended() and Path(f"/proc/{pid}").exists():
            if attempt.folder.is_superseded(attempt.number):
                attempt.log("A later attempt has begun, so this script ends its srun.")
                return _kill(pid)

            self._end_failed_launch(pid)
            if attempt.exit_code_of(0) is None:
                continue

            waited_s += _TICK_S
            if waited_s >= self._limit_s():
                attempt.log(
                    f"The agent of node 0 has exited, but srun has not ended within {waited_s:.0f} s, so "
                    "this script ends srun."
                )
                return _kill(pid)

    def _end_failed_launch(self, pid: int) -> None:
        """Send SIGTERM to srun if SLURM could not start an agent, so that srun cancels the other agents."""
        if self._launch_ticks == 0:
            return

        self._launch_ticks -= 1
        failure = launch_failure(self._attempt, self._hosts)
        if failure is None:
            return

        self._launch_ticks = 0
        self._is_ending = True
        record(self._attempt, failure)
        self._attempt.log(
            f"SLURM could not start the agent of node {failure.node} ({failure.host}), so this script ends "
            "srun."
        )
        # `pid` is the subshell; srun is its child.
        for child in _children(pid):
            with suppress(OSError):
                os.kill(child, signal.SIGTERM)

    def _limit_s(self) -> float:
        """Return the longest time, in seconds, that srun may take to end after node 0's agent has exited."""
        # When SLURM ends the job, this script must end soon: if SLURM restarts the job on this host while the
        # script still runs, SLURM drains the host.
        if self._is_ending:
            return self._kill_wait_s // 3

        attempt = self._attempt
        return _LEFT_S if attempt.silent_nodes() == attempt.replaced_nodes() else _SILENT_S


def _kill(pid: int) -> None:
    """Kill the subshell that runs srun, then all its descendants, the deepest first.

    srun has a child that waits for the death of srun and then cancels the step by id. By then this id may
    belong to a step of a later attempt. So the child is killed before srun.
    """
    for process in [pid, *_descendants(pid)]:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process, each before its parent."""
    return [process for child in _children(pid) for process in [*_descendants(child), child]]


def _children(pid: int) -> list[int]:
    """Return the children of a process; empty if it has ended."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, task.read_text().split())
    return children
