"""One rank: turn a fresh process of the agent into a rank, run it, and leave.

    python -m slurmddp.launchers.agent.worker DESCRIPTOR

The agent starts this program if it can't be forked. The descriptor holds as JSON what a forked rank finds in
its memory. No other account can read it, unlike a command line.
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
from slurmddp.host.streams import lines_to, tell

_DESCRIPTORS = (HEARTBEAT_VARIABLE, CHANNEL_VARIABLE, MEMORY_VARIABLE)
_FAILED_END_S = 10.0
"""Seconds for the threads and exit handlers of a failed rank, which may wait for a peer that is lost."""


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """The environment, the log and the function of one rank."""

    local_rank: int
    environ: Mapping[str, str]
    log: Path
    entry: str
    """`module:function`; it gets `run_dir` and returns the rank's exit code."""
    run_dir: str

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that the rank inherits by number."""
        return descriptors_in(self.environ)


def descriptors_in(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the descriptors that a rank inherits by number, and that its environment names."""
    numbers = ",".join(environ.get(name, "") for name in _DESCRIPTORS).split(",")
    return tuple(int(number) for number in numbers if number.isdecimal())


def spawn(start: RankSpec) -> int:
    """Start one rank as a program in a new process group; return its pid.

    The rank inherits the signal mask, and unblocks signals once it is set up.
    """
    values = {"agent": os.getpid(), "path": sys.path, "start": asdict(start) | {"log": str(start.log)}}
    letter = os.memfd_create("slurmddp-rank")
    try:
        os.write(letter, json.dumps(values).encode())
        os.lseek(letter, 0, os.SEEK_SET)
        command = [sys.executable, "-m", __name__, str(letter)]
        for descriptor in (letter, *start.descriptors):
            os.set_inheritable(descriptor, True)
        return os.posix_spawn(command[0], command, {**os.environ, **start.environ}, setpgroup=0)
    finally:
        os.close(letter)


def main(argv: Sequence[str]) -> NoReturn:
    """Become the rank that the agent has described behind the descriptor."""
    with open(int(argv[0]), encoding="utf-8") as letter:
        values = json.load(letter)
    # `python -m` put the folder of its start in the first place; the agent imports the snapshot's modules.
    sys.path[:] = values["path"]
    start = RankSpec(**{**values["start"], "log": Path(values["start"]["log"])})
    be_rank(start, values["agent"])


def be_rank(start: RankSpec, agent: int, in_child: Sequence[Callable[[], object]] = ()) -> NoReturn:
    """Turn this fresh process of the agent into a rank, run it, and leave without the agent's clean-up.

    The end is the end of a Python program: threads, exit handlers, open files. Only the interpreter itself is
    not taken apart: with torch in it, that takes long, and may wait for a lost peer or crash.

    `in_child` are calls by which a forked process closes what belongs to the agent.
    """
    code = EXIT_FAILED
    try:
        process.die_with_parent(signal.SIGKILL, agent)
        _set_up(start, in_child)
        code = run_entry(start.entry, start.run_dir)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # The code stands; a late signal must not replace it.
        interpreter.finish(code, None if code in GOOD_CODES else _FAILED_END_S)
    except BaseException:
        tell(traceback.format_exc().rstrip())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _set_up(start: RankSpec, in_child: Sequence[Callable[[], object]]) -> None:
    with suppress(PermissionError):  # The leader of a session, as torchrun starts it, leads its group.
        os.setpgid(0, 0)
    for close in in_child:
        close()
    interpreter.draw_anew()
    _set_signals()
    _write_to(start.log)
    os.environ.update(start.environ)
    faulthandler.enable()
    arm_stacks(start.environ)


def _set_signals() -> None:
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    # A terminal's Ctrl-C is handled by the launcher; it reaches ranks as SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop_before_training)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGINT, signal.SIGCHLD})


def _stop_before_training(number: int, frame: FrameType | None) -> None:
    """Leave at once: until the rank sets other handlers it has nothing to save."""
    os._exit(EXIT_STOPPED)


def _write_to(log: Path) -> None:
    """Send both output streams, of Python and below it, line by line to the rank's log."""
    # A link that another account has put there would lead to any file of this account.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.close(nothing)
    sys.stdout, sys.stderr = lines_to(1), lines_to(2)


def run_entry(entry: str, run_dir: str) -> int:
    """Return the exit code of `entry`; an exception is printed and becomes its code."""
    module, _, function = entry.partition(":")
    try:
        main: Callable[[str], int | None] = getattr(importlib.import_module(module), function)
        return _as_byte(int(main(run_dir) or EXIT_FINISHED))
    except StoppedAtCheckpoint as error:
        if not error.is_printed:
            tell(f"{error.message}\n{error.hint}".rstrip())
        return error.exit_code
    except SlurmddpError as error:
        interpreter.note_uncaught(error)
        _report(ReportedError(error.message, error.hint))
        tell(f"Error: {error.message}\n{error.hint}".rstrip())
        return error.exit_code
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return _as_byte(error.code or EXIT_FINISHED)
        text = str(error.code).strip()
        _report(ReportedError(text, ""))
        tell(f"SystemExit: {text}")
        return EXIT_FAILED
    except BaseException as error:
        interpreter.note_uncaught(error)
        tell(traceback.format_exc().rstrip())
        return EXIT_FAILED


def _report(error: ReportedError) -> None:
    HeartbeatPage.attach(os.environ).report_error(error)


def _as_byte(code: int) -> int:
    """Return the low byte of an exit code, as the kernel does; 256 of `os.system` stays a failure."""
    return code & 0xFF or (EXIT_FAILED if code else EXIT_FINISHED)


if __name__ == "__main__":
    main(sys.argv[1:])
