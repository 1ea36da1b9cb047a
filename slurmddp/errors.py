"""Errors that a person reads, each with its exit code and a hint; and the table of all exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_RUN = 66
EXIT_LOGIN_NODE = 68
EXIT_SLURM = 69
EXIT_RUN_STATE = 73
EXIT_STOPPED = 75
EXIT_UNHEALTHY_NODE = 76
EXIT_CONFIG = 78
EXIT_NO_PROGRESS = 79
EXIT_INTERRUPTED = 130


class ExitCode(NamedTuple):
    """The meaning of an exit code, a row of the tables in `slurmddp --help`, README and docs/requeue.md."""

    meaning: str
    detail: str = ""
    follows: str = ""
    """The event that follows a batch job with this code; empty if no batch job ends with it."""

    @property
    def text(self) -> str:
        """The meaning with its details, for a person who has typed a command."""
        return "; ".join(filter(None, (self.meaning, self.detail)))


EXIT_CODES = {
    EXIT_FINISHED: ExitCode(
        "finished, or submitted",
        "with `train` and `resume` also: the run is active already",
        "nothing; a job that finds its run ended, stopped, cancelled, or run by another job ends so too",
    ),
    EXIT_FAILED: ExitCode(
        "the training failed, or a checkpoint is bad, missing or not written",
        "rank, host and last lines of a failure are shown",
        "tried again within `policy.max_restarts`, after progress; without progress once more, if an earlier "
        "attempt had progressed; also after codes not in this table",
    ),
    EXIT_USAGE: ExitCode("unknown command or flag, or a missing or wrong argument"),
    EXIT_NO_RUN: ExitCode("no run of that name, or several"),
    EXIT_LOGIN_NODE: ExitCode("the login node (`ssh=`) can't be reached, or can't run this slurmddp"),
    EXIT_SLURM: ExitCode("SLURM is missing, does not answer, or refused"),
    EXIT_RUN_STATE: ExitCode(
        "the run has finished, is ending, or is active, so it can't be changed or put aside",
        "nothing was done",
    ),
    EXIT_STOPPED: ExitCode(
        "stopped before its end",
        "the same command resumes, from a checkpoint if the program has saved one",
        "the run resumes by itself, unless a person stopped it or `policy.requeue=false`",
    ),
    EXIT_UNHEALTHY_NODE: ExitCode(
        "a node failed the preflight, or SLURM could not start its agent",
        "the job runs again",
        "tried again within `policy.max_restarts`; after the preflight on other nodes",
    ),
    EXIT_CONFIG: ExitCode(
        "a wrong value of a setting or flag",
        "if it was found at once, nothing was started, queued or written",
        "nothing: correct it, then `slurmddp train` again; an array submitted by hand ends so too",
    ),
    EXIT_NO_PROGRESS: ExitCode(
        "no progress since the last attempt, or a later attempt has taken over",
        "the job does not run again",
        "nothing from this job; the log says which",
    ),
    EXIT_INTERRUPTED: ExitCode(
        "interrupted", "a killed local run resumes from its last checkpoint, if its program has saved one"
    ),
}
GOOD_CODES = frozenset({EXIT_FINISHED, EXIT_STOPPED})
"""Codes of a rank that has not failed."""


class SlurmddpError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what was given and what was found.
        hint: what to do.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class ConfigError(SlurmddpError):
    """A value can't be right. Most are found before anything is started or queued."""

    exit_code = EXIT_CONFIG


class MismatchError(ConfigError):
    """The job asks for other tasks, GPUs or hosts than this process finds."""


class UsageError(SlurmddpError):
    """An unknown command or flag, or a missing or wrong argument."""

    exit_code = EXIT_USAGE


class RunNotFoundError(SlurmddpError):
    """No run folder has the given name."""

    exit_code = EXIT_NO_RUN


class RunStateError(SlurmddpError):
    """The run has finished, is ending, or is active, so the command changed nothing."""

    exit_code = EXIT_RUN_STATE


class LoginNodeError(SlurmddpError):
    """The login node can't be reached by ssh, or it can't run this slurmddp. Nothing was started."""

    exit_code = EXIT_LOGIN_NODE
    last_line = ""
    """The last line that ssh or the host printed; empty if there was none."""


class SlurmError(SlurmddpError):
    """SLURM is missing, did not answer, or refused a request. The message holds the words of SLURM."""

    exit_code = EXIT_SLURM
    may_be_queued = False
    """Whether sbatch may have queued the job all the same. The run folder then stays."""


class CheckpointError(SlurmddpError):
    """A checkpoint can't be written or read."""


class RankFailure(SlurmddpError):
    """A rank failed. The message names the rank, its host, the cause and its last lines."""


class UnhealthyNodeError(SlurmddpError):
    """The preflight found an unhealthy node, and the next attempt avoids it."""

    exit_code = EXIT_UNHEALTHY_NODE


class StoppedAtCheckpoint(SlurmddpError, SystemExit):
    """The training stopped at a checkpoint on request, and resumes when it is run again.

    A program that does not catch the error exits with 75 and without a traceback, as after `sys.exit(75)`.
    """

    exit_code = EXIT_STOPPED
    is_printed = False
    """Whether the rank has printed the message already: Python prints nothing of a SystemExit."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = EXIT_STOPPED


class NoProgressError(SlurmddpError):
    """The attempts of a run end where they began, so another attempt would not help."""

    exit_code = EXIT_NO_PROGRESS


class SupersededError(SlurmddpError):
    """A later attempt owns the run. This attempt writes nothing more and does not run again."""

    exit_code = EXIT_NO_PROGRESS


HINT = "hint: "
"""The beginning of a line of a log that says what to do about an error of a program."""


def near_matches(given: str, known: Iterable[str], *, prefix: str = "", else_all: bool = True) -> str:
    """Return a sentence that suggests the names nearest to `given`.

    Args:
        given: the name that a person typed.
        known: the names that exist.
        prefix: text to put before each suggested name.
        else_all: whether to list all known names if no name is near.

    Returns:
        `Did you mean a or b?`, or `Known: a, b, c.`, or an empty text.
    """
    names = sorted(known)
    near = nearest(given, names)
    if near:
        return f"Did you mean {' or '.join(prefix + name for name in near)}?"
    return f"Known: {', '.join(names)}." if names and else_all else ""


def nearest(given: str, known: Iterable[str]) -> list[str]:
    """Return the names that `given` may mean, at most three, the most similar first."""
    import difflib  # Imported late: the batch step never needs it.

    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.6)
    return near or [name for name in names if len(given) > 2 and name.startswith(given)][:3]


def plain(error: OSError) -> str:
    """Return the reason and the file of an OSError, without the error number."""
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


def unreadable(path: object, error: OSError) -> SlurmddpError:
    """Return the error for a file of a run that can't be read, with the reason."""
    return SlurmddpError(
        f"{path} can't be read: {error.strerror or error}.",
        hint="slurmddp did not leave it so: put the file back from a copy, or correct its permissions.",
    )


def combine_exit_codes(codes: Iterable[int]) -> int:
    """Return the exit code of a group from its members' codes: a refusal, else a failure, else a stop."""
    found = set(codes)
    for deliberate in (EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNHEALTHY_NODE):
        if deliberate in found:
            return deliberate
    if found - {EXIT_FINISHED, EXIT_STOPPED}:
        return EXIT_FAILED
    return EXIT_STOPPED if EXIT_STOPPED in found else EXIT_FINISHED
