"""Watch srun and end it if it waits for agents which have left: SLURM may be unable to report their ends."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from slurmddp.batch.attempt import Attempt
from slurmddp.environments.names import KILL_WAIT_VARIABLE

_TICK_S = 2.0
_LEFT_S = 60.0
"""Seconds that srun may take to end after all agents have left."""
_SILENT_S = 1200.0
"""The same if an agent has left no exit code: it may still write a checkpoint."""
_KILL_WAIT_S = 30
"""SLURM's default."""


def watch(attempt: Attempt, environ: Mapping[str, str]) -> None:
    """Read the process id of srun from standard input, and watch it until it ends or the input is closed."""
    kill_wait = environ.get(KILL_WAIT_VARIABLE, "")
    srun = SrunWatch(attempt, kill_wait_s=int(kill_wait) if kill_wait.isdigit() else _KILL_WAIT_S)
    signal.signal(signal.SIGTERM, srun.note_end)
    line = sys.stdin.readline().strip()
    if line.isdigit():
        srun.run(int(line), lambda: bool(select.select([sys.stdin], [], [], _TICK_S)[0]))


class SrunWatch:
    """The watch over one srun."""

    def __init__(self, attempt: Attempt, *, kill_wait_s: float) -> None:
        self._attempt, self._kill_wait_s = attempt, kill_wait_s
        self._is_ending = False

    def note_end(self, _number: int, _frame: object) -> None:
        """Note that SLURM ends the job."""
        self._is_ending = True

    def run(self, pid: int, has_ended: Callable[[], bool]) -> None:
        """Check srun every two seconds and end it when it has waited for too long.

        Args:
            pid: the process id of srun.
            has_ended: waits two seconds at most for the end of srun; returns whether srun has ended.
        """
        waited = 0.0
        while not has_ended() and Path(f"/proc/{pid}").exists():
            if self._attempt.exit_code_of(0) is None:
                continue
            waited += _TICK_S
            if waited >= self._limit_s():
                self._attempt.say(
                    f"The agents have left, and SLURM has not told srun within {waited:.0f} s: "
                    "this script ends srun."
                )
                return _kill(pid)

    def _limit_s(self) -> float:
        if self._is_ending:
            # If SLURM restarts the job here before this script has ended, SLURM drains the host.
            return self._kill_wait_s // 3
        attempt = self._attempt
        return _LEFT_S if attempt.silent_nodes() == attempt.replaced_nodes() else _SILENT_S


def _kill(pid: int) -> None:
    """Kill srun: the subshell that runs it, and its children."""
    for one in (pid, *_children(pid)):
        with suppress(OSError):
            os.kill(one, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found
