"""Forked rank processes of one node: how a copy of the agent becomes a rank, and how ranks are watched.

A fork shares what the agent has imported, so eight ranks cost one import of torch. Each rank leads a process
group of its own: whatever it starts (data loader workers, say) is found and ended with it.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, SlurmddpError
from slurmddp.launchers import linux
from slurmddp.launchers.signals import STOP_SIGNALS, SignalInbox

GOOD_CODES = frozenset({EXIT_FINISHED, EXIT_STOPPED})
_UNKILLABLE_S = 2.0
"""How long a killed process is waited for; one that the kernel holds in I/O is left to SLURM."""


@dataclass(frozen=True)
class RankExit:
    """One ended rank; `returncode` is negative for a signal, as in `subprocess`."""

    local_rank: int
    returncode: int

    @property
    def good(self) -> bool:
        return self.returncode in GOOD_CODES


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """What one rank needs to begin: its place, its log, and the function it runs."""

    local_rank: int
    environ: Mapping[str, str]
    log: Path
    entry: str
    """`module:function`; it gets `run_dir` and returns the rank's exit code."""
    run_dir: str


class Ranks:
    """The ranks of one node that run, by pid; all methods belong to the thread that forks."""

    def __init__(self, inbox: SignalInbox) -> None:
        self._inbox = inbox
        self._running: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self._running)

    def fork(self, start: RankStart) -> None:
        """Start one rank; it shares all modules with this process and nothing that changes later."""
        agent = os.getpid()
        # No signal may reach the child while it still shares the agent's handlers and wake-up pipe.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGINT, signal.SIGCHLD})
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of the idle threads that numpy's BLAS starts; they are not Python's.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _be_rank(start, agent, self._inbox)
            self._running[pid] = start.local_rank
            with suppress(ProcessLookupError):
                os.setpgid(pid, pid)  # The child does it too, so the group exists from now on.
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def signal(self, sent: signal.Signals) -> None:
        """Send `sent` to every rank that runs, not to the processes that ranks have started."""
        for pid in self._running:
            os.kill(pid, sent)

    def reap(self) -> list[RankExit]:
        """Return the ranks that have ended since the last call, with what they left running ended as well."""
        ended = []
        while (pid := _ended_child()) is not None:
            if pid in self._running:
                # The dead leader still holds its pid here, so its group can't be somebody else's.
                linux.signal_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if pid in self._running:
                ended.append(RankExit(self._running.pop(pid), os.waitstatus_to_exitcode(status)))
        return ended

    def end(self, grace_s: float) -> None:
        """End every rank: SIGTERM, then after `grace_s` SIGKILL; returns when none is left."""
        self.signal(signal.SIGTERM)
        self._await_end(time.monotonic() + grace_s)
        for pid in self._running:
            linux.signal_group(pid, signal.SIGKILL)
        self._await_end(time.monotonic() + _UNKILLABLE_S)

    def _await_end(self, deadline: float) -> None:
        self.reap()
        while self._running and time.monotonic() < deadline:
            time.sleep(0.01)
            self.reap()


def _ended_child() -> int | None:
    """Return the pid of a child that has ended and is not yet waited for."""
    with suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found.si_pid if found is not None else None
    return None


def _be_rank(start: RankStart, agent: int, inbox: SignalInbox) -> NoReturn:
    """Turn this fresh copy of the agent into a rank, run it, and leave without the agent's clean-up."""
    code = EXIT_FAILED
    try:
        linux.die_with_parent(signal.SIGKILL, agent)
        _take_own_place(start, inbox)
        code = _run_entry(start.entry, start.run_dir)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # The code stands; a late signal must not replace it.
        if code in GOOD_CODES:
            atexit._run_exitfuncs()  # Loggers finish here; a failed rank must not wait for anything.
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # A thread that waits for a lost peer would keep the process alive through a normal exit.
        os._exit(code)


def _take_own_place(start: RankStart, inbox: SignalInbox) -> None:
    os.setpgid(0, 0)
    inbox.forget_in_child()
    _set_signals()
    _write_to(start.log)
    os.environ.update(start.environ)
    faulthandler.enable()


def _set_signals() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A terminal's Ctrl-C is for the one who started the run; it reaches ranks as SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop_before_training)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGINT, signal.SIGCHLD})


def _stop_before_training(number: int, frame: FrameType | None) -> None:
    """Leave at once: until the worker puts its own handlers in place there is nothing to save."""
    os._exit(EXIT_STOPPED)


def _write_to(log: Path) -> None:
    """Send both output streams, of Python and below it, line by line to the rank's log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.close(nothing)
    sys.stdout, sys.stderr = _lines_to(1), _lines_to(2)


def _lines_to(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _run_entry(entry: str, run_dir: str) -> int:
    """Return the exit code of `entry`; an exception is printed and becomes its code."""
    module, _, function = entry.partition(":")
    try:
        main: Callable[[str], int | None] = getattr(importlib.import_module(module), function)
        return int(main(run_dir) or EXIT_FINISHED)
    except SlurmddpError as error:
        print(f"Error: {error.message}\n{error.hint}".rstrip(), file=sys.stderr)
        return error.exit_code
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or EXIT_FINISHED
        print(error.code, file=sys.stderr)
        return EXIT_FAILED
    except BaseException:
        traceback.print_exc()
        return EXIT_FAILED
