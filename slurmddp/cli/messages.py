"""Print errors and the events of actions, and describe the exit codes.

The module imports little, because every command waits for it.
"""

from __future__ import annotations

import errno
import sys
import traceback

from slurmddp.errors import EXIT_CODES, SlurmddpError, plain
from slurmddp.short_text import first_items

OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers of a full disk or missing permissions, which are no bugs of slurmddp."""
EXIT_BROKEN_PIPE = 141
"""Exit code of a program that SIGPIPE ends, as a shell reports it."""
_NAMED_FILES = 5
"""Number of files that a note names."""
EXIT_CODES_HELP = "exit codes:\n" + "".join(f"  {code:<3} {row.text}\n" for code, row in EXIT_CODES.items())


def print_event(event: object) -> None:
    """Print an event that an action of `slurmddp.control` reports while it runs."""
    from slurmddp.control import events

    match event:
        case events.HostOutput(text):
            print(text, end="", flush=True)
        case events.HostGreeting(text):
            print(text, end="", file=sys.stderr, flush=True)
        case events.Waiting(reason=text):
            print(text, file=sys.stderr, flush=True)
        case events.Note(text):
            print(f"slurmddp: note: {text}", file=sys.stderr, flush=True)
        case events.Info(text):
            print(text, flush=True)
        case _:
            _print_event_over_ssh(event)


def _print_event_over_ssh(event: object) -> None:
    """Print an event about a login node: it does not answer, or the code was sent; ignore other events."""
    from slurmddp.control import events
    from slurmddp.runs.text_format import counted

    match event:
        case events.HostSilent(host, seconds):
            line = (
                f"slurmddp: note: {host} has not answered for {seconds:g} s. A shell profile there, such as "
                "~/.bashrc, may wait or read the standard input. Ctrl-C gives up; nothing was started."
            )
        case events.HostUnknown(host, reason):
            line = f"slurmddp: {host} does not answer: {reason}"
        case events.CodeSent(host, folder, files, left_out):
            line = f"code    {host}:{folder}  ({counted(files, 'file')})"
            if left_out:
                names = first_items(left_out, _NAMED_FILES)
                line += f"\nnote    not sent, because they may hold passwords or keys: {names}"
        case _:
            return

    print(line, file=sys.stderr, flush=True)


def report(error: SlurmddpError, *, debug: bool = False) -> int:
    """Print an error and its hint; return its exit code.

    Args:
        error: the error.
        debug: whether to print the traceback first.
    """
    if debug:
        traceback.print_exception(error)

    between = "" if error.message.endswith("\n") else " "
    print(f"slurmddp: error: {error.message}{between}{error.hint}".strip(), file=sys.stderr)

    return error.exit_code


def report_machine(error: OSError) -> int:
    """Print an error of the operating system, such as a full disk; return the exit code 1."""
    hint = "Free some space or correct the permissions, then run the command again."
    return report(SlurmddpError(f"{plain(error)}.", hint=hint))


def report_bug(error: BaseException) -> int:
    """Print an unexpected error with its traceback; return the exit code 1."""
    traceback.print_exception(error)
    hint = "This is a bug in slurmddp, not in your input; please report it with the lines above."
    return report(SlurmddpError(f"{type(error).__name__}: {error}.", hint=hint))
