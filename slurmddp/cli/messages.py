"""How an error reads on the terminal, and what the exit codes mean; must stay light to import."""

from __future__ import annotations

import errno
import sys
import traceback

from slurmddp.errors import EXIT_FAILED, SlurmddpError

NOT_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_CODES = """exit codes:
  0   finished, or submitted; of `train` and `resume` also: the run is queued or runs already
  1   the training failed: rank, host and last lines are shown; or a checkpoint is bad, missing or not written
  2   unknown command or flag, or an argument that is missing or of the wrong kind
  66  no run of that name, or several
  69  SLURM is missing, does not answer, or refused
  73  the run has finished, still stops, or runs and can't take the changes: nothing was changed
  75  stopped at a checkpoint: run it again and it goes on
  76  the preflight found a node that is not fit; a job is tried again on others
  78  a wrong value of a setting or flag; if it was seen at once, nothing was started, queued or written
  79  no progress since the last attempt
  130 interrupted; a local run that is killed resumes from its last checkpoint
"""


def paragraph(message: str, hint: str = "") -> str:
    """Return an error as it stands on the terminal: who speaks, what is wrong, what to do."""
    between = "" if message.endswith("\n") else " "
    return f"slurmddp: error: {message}{between}{hint}".strip()


def report(error: SlurmddpError, *, debug: bool) -> int:
    """Print an error that a person is meant to read, and return its exit code."""
    if debug:
        traceback.print_exception(error)
    print(paragraph(error.message, error.hint), file=sys.stderr)
    return error.exit_code


def report_machine(error: OSError) -> int:
    """Print what the machine refuses (a full disk, a folder that may not be written); not our fault."""
    where = f" ({error.filename})" if error.filename else ""
    print(
        paragraph(f"{error.strerror}{where}.", "Free space or correct the permissions, then run it again."),
        file=sys.stderr,
    )
    return EXIT_FAILED


def report_bug(error: BaseException) -> int:
    """Print an error that nobody foresaw, with all that is needed to find it."""
    traceback.print_exception(error)
    print(
        paragraph(
            f"{type(error).__name__}: {error}.",
            "This is a fault of slurmddp, not of your input; please report it with the lines above.",
        ),
        file=sys.stderr,
    )
    return EXIT_FAILED
