"""Run one of SLURM's commands, on the login side and in the batch step."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_ANNOUNCED_AFTER_S = 3.0
"""Seconds after which a person is informed that a command of SLURM has not answered yet."""


class CommandResult(NamedTuple):
    """The exit code and the output of one command."""

    code: int
    out: str = ""
    err: str = ""
    timed_out: bool = False

    @property
    def is_retryable(self) -> bool:
        """Whether slurmctld could not be reached, so that the command may succeed later."""
        # Imported here, because `batch/begin.py`, which must start fast, does not need this module.
        from slurmddp.slurm.rejections import is_transient

        return self.timed_out or self.code < 0 or is_transient(f"{self.out}\n{self.err}".strip())


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    *,
    open_files: int | None = None,
    announce: Callable[[str], object] = lambda _text: None,
) -> CommandResult:
    """Run a command to its end; kill a command that hangs, with its children.

    Args:
        command: the program and its arguments.
        environ: the variables of the command.
        timeout_s: seconds after which the command counts as hanging and is killed.
        open_files: the soft limit of open files for the command; None keeps this process's limit.
        announce: called with a sentence if the command takes longer than `_ANNOUNCED_AFTER_S` seconds.

    Returns:
        Exit code and output. The exit code is 127 if the program can't be started, and 124 if it was killed.
    """
    program = command[0]
    # `ulimit` of a shell sets the limit only for the command; this process keeps its own limit.
    if open_files is not None:
        command = ["sh", "-c", f'ulimit -Sn {open_files} && exec "$@"', "sh", *command]
    try:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            errors="replace",
            # Start a new process group, so that a hanging command can be killed together with its children.
            start_new_session=True,
        )
    except OSError as error:
        return CommandResult(127, err=f"{program}: {error.strerror}")

    with process:
        try:
            out, err = _output(process, program, timeout_s, announce)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return CommandResult(124, err=_no_answer(program, timeout_s, error.stderr), timed_out=True)

    return CommandResult(process.returncode, out, err)


def _output(
    process: subprocess.Popen[str], program: str, timeout_s: float, announce: Callable[[str], object]
) -> tuple[str, str]:
    """Return the output and the error output of a command; raise TimeoutExpired if the command hangs."""
    try:
        return process.communicate(timeout=min(timeout_s, _ANNOUNCED_AFTER_S))
    except subprocess.TimeoutExpired:
        if timeout_s <= _ANNOUNCED_AFTER_S:
            raise

    announce(f"{program} has not answered yet; waiting up to {timeout_s:g} s for it.")
    return process.communicate(timeout=timeout_s - _ANNOUNCED_AFTER_S)


def _no_answer(program: str, timeout_s: float, err: bytes | None) -> str:
    """Return a sentence about a time-out, with the error output that the command had printed until then."""
    sentence = f"{program} gave no answer within {timeout_s:g} s."
    printed = " ".join((err or b"").decode(errors="replace").split())
    if printed:
        sentence += f" It printed: {printed.rstrip('.')}."
    return sentence
