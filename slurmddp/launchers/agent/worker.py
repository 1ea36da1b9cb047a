"""Turn a new process of the agent into a rank, run the rank, and exit.

    python -m slurmddp.launchers.agent.worker DESCRIPTOR

The agent starts this program if it can't be forked. From the descriptor the program reads, as JSON, the
description that a forked rank has in its memory. Unlike a command line, no other account can read it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from slurmddp.environments.names import CHANNEL_VARIABLE, HEARTBEAT_VARIABLE, MEMORY_VARIABLE
from slurmddp.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    GOOD_CODES,
    SlurmddpError,
    StoppedAtCheckpoint,
)
from slurmddp.host import interpreter, process
from slurmddp.host.heartbeat_page import HeartbeatPage, ReportedError, arm_stacks
from slurmddp.host.signals import STOP_SIGNALS
from slurmddp.host.streams import lines_to, print_to_log

_DESCRIPTORS = (HEARTBEAT_VARIABLE, CHANNEL_VARIABLE, MEMORY_VARIABLE)
_FAILED_END_S = 10.0
"""Seconds for the threads and exit handlers of a failed rank, which may wait for a lost peer."""


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """The environment, the log and the function of one rank."""

    local_rank: int
    environ: Mapping[str, str]
    log: Path
    entry: str
    """A `module:function`, which gets `run_dir` and returns the rank's exit code."""
    run_dir: str

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the rank inherits by number."""
        return descriptors_in(self.environ)


def descriptors_in(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the descriptors whose numbers are in the environment of a rank, which inherits them."""
    numbers = ",".join(environ.get(name, "") for name in _DESCRIPTORS).split(",")
    return tuple(int(number) for number in numbers if number.isdecimal())


def spawn(rank: RankSpec) -> int:
    """Start one rank as a program in a new process group; return its pid.

    The rank inherits the signal mask, and unblocks signals once it is set up.
    """
    values = {"agent": os.getpid(), "path": sys.path, "rank": asdict(rank) | {"log": str(rank.log)}}
    description = os.memfd_create("slurmddp-rank")
    try:
        os.write(description, json.dumps(values).encode())
        os.lseek(description, 0, os.SEEK_SET)
        for descriptor in (description, *rank.descriptors):
            os.set_inheritable(descriptor, True)

        command = [sys.executable, "-m", __name__, str(description)]
        return os.posix_spawn(command[0], command, {**os.environ, **rank.environ}, setpgroup=0)
    finally:
        os.close(description)


def main(argv: Sequence[str]) -> NoReturn:
    """Read the description of a rank from the descriptor `argv[0]`, and become this rank."""
    with open(int(argv[0]), encoding="utf-8") as description:
        values = json.load(description)

    # Use the agent's search path, which finds the snapshot: `python -m` has put the working folder first.
    sys.path[:] = values["path"]
    rank = RankSpec(**{**values["rank"], "log": Path(values["rank"]["log"])})
    be_rank(rank, values["agent"])


def be_rank(rank: RankSpec, agent: int, in_child: Sequence[Callable[[], object]] = ()) -> NoReturn:
    """Turn this new process of the agent into a rank, run the rank, and exit without the agent's clean-up.

    The rank ends as a Python program does: it waits for threads, runs exit handlers and flushes files. Only
    the interpreter is not finalized. With torch that takes long, and may wait for a lost peer or crash.

    Args:
        rank: the rank.
        agent: the pid of the agent.
        in_child: calls by which a forked process closes the resources of the agent.
    """
    code = EXIT_FAILED
    try:
        process.die_with_parent(signal.SIGKILL, agent)
        _set_up(rank, in_child)
        code = run_entry(rank.entry, rank.run_dir)

        # The exit code is decided: a late signal must not replace it.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        interpreter.finish(code, None if code in GOOD_CODES else _FAILED_END_S)
    except BaseException:
        print_to_log(traceback.format_exc().rstrip())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _set_up(rank: RankSpec, in_child: Sequence[Callable[[], object]]) -> None:
    # setpgid fails in a session leader, which leads its own process group already.
    with suppress(PermissionError):
        os.setpgid(0, 0)
    for close in in_child:
        close()

    interpreter.draw_anew()
    _set_signals()
    _write_to(rank.log)
    os.environ.update(rank.environ)
    faulthandler.enable()
    arm_stacks(rank.environ)


def _set_signals() -> None:
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    # The launcher handles a terminal's Ctrl-C, which reaches the ranks as SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop_before_training)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGINT, signal.SIGCHLD})


def _stop_before_training(number: int, frame: FrameType | None) -> None:
    """Exit at once with 75: a rank that has not set other handlers has nothing to save."""
    os._exit(EXIT_STOPPED)


def _write_to(log: Path) -> None:
    """Redirect stdout and stderr, of Python and of compiled code, line by line to the rank's log.

    Standard input becomes empty.
    """
    # O_NOFOLLOW: another account may have replaced the log by a link to a file of this account.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.close(empty)
    sys.stdout = lines_to(1)
    sys.stderr = lines_to(2)


def run_entry(entry: str, run_dir: str) -> int:
    """Call `entry`, a `module:function`, with `run_dir` and return the exit code.

    An exception is printed and decides the exit code.
    """
    module, _, function = entry.partition(":")
    try:
        main: Callable[[str], int | None] = getattr(importlib.import_module(module), function)
        return _as_byte(int(main(run_dir) or EXIT_FINISHED))
    except StoppedAtCheckpoint as error:
        if not error.is_printed:
            print_to_log(f"{error.message}\n{error.hint}".rstrip())
        return error.exit_code
    except SlurmddpError as error:
        interpreter.note_uncaught(error)
        _report(ReportedError(error.message, error.hint))
        print_to_log(f"Error: {error.message}\n{error.hint}".rstrip())
        return error.exit_code
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return _as_byte(error.code or EXIT_FINISHED)
        text = str(error.code).strip()
        _report(ReportedError(text, ""))
        print_to_log(f"SystemExit: {text}")
        return EXIT_FAILED
    except BaseException as error:
        interpreter.note_uncaught(error)
        print_to_log(traceback.format_exc().rstrip())
        return EXIT_FAILED


def _report(error: ReportedError) -> None:
    HeartbeatPage.attach(os.environ).report_error(error)


def _as_byte(code: int) -> int:
    """Return the low byte of an exit code, as the kernel does; but 1 for a failure whose low byte is 0."""
    return code & 0xFF or (EXIT_FAILED if code else EXIT_FINISHED)


if __name__ == "__main__":
    main(sys.argv[1:])
