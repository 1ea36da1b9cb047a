"""The errors that slurmddp raises, each with an exit code and a hint, and the table of all exit codes."""

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
    """The meaning of an exit code, as in `slurmddp --help` and the tables of docs/reference/exit-codes.md."""

    meaning: str
    detail: str = ""
    follows: str = ""
    """How a run continues after a batch job has ended with this code; empty if no batch job ends with it."""

    @property
    def text(self) -> str:
        """The meaning with its details, for a person who typed a command."""
        return "; ".join(filter(None, (self.meaning, self.detail)))


EXIT_CODES = {
    EXIT_FINISHED: ExitCode(
        "finished, or submitted",
        "with `train` and `resume` also: the run is active already",
        "nothing; also the code of a job whose run has ended, was stopped, cancelled, or runs in another job",
    ),
    EXIT_FAILED: ExitCode(
        "the training failed, or a checkpoint is bad, missing or not written",
        "rank, host and last lines of a failure are shown",
        "the job is requeued, within `policy.max_restarts`, after progress, or once if only an earlier "
        "attempt made progress; also after codes not in this table",
    ),
    EXIT_USAGE: ExitCode("unknown command or flag, or a missing or wrong argument"),
    EXIT_NO_RUN: ExitCode("no run of that name, or several"),
    EXIT_LOGIN_NODE: ExitCode("the login node (`ssh=`) can't be reached, or can't run this slurmddp"),
    EXIT_SLURM: ExitCode("SLURM is missing, does not answer, or refused"),
    EXIT_RUN_STATE: ExitCode(
        "the run has finished, is ending, or is active, so it can't be changed or started again",
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
        "the job is requeued, within `policy.max_restarts`; after a failed preflight on other nodes",
    ),
    EXIT_CONFIG: ExitCode(
        "a wrong value of a setting or flag",
        "if it was found at once, nothing was started, queued or written",
        "nothing; correct the value, `slurmddp train` again; also the code of an array submitted by hand",
    ),
    EXIT_NO_PROGRESS: ExitCode(
        "no progress since the last attempt, or a later attempt has taken over",
        "the job does not run again",
        "this job is not requeued; its log shows which of the two it was",
    ),
    EXIT_INTERRUPTED: ExitCode(
        "interrupted", "a killed local run resumes from its last checkpoint, if its program has saved one"
    ),
}
GOOD_CODES = frozenset({EXIT_FINISHED, EXIT_STOPPED})
"""Exit codes of a rank that has not failed."""


class SlurmddpError(Exception):
    """The base class of the errors that slurmddp raises with a message for a person.

    Args:
        message: what happened and where, as sentences.
        hint: what to do, as sentences; empty if there is nothing to do.

    Attributes:
        exit_code: the exit code of a command that ends with this error.

    Example:
        raise ConfigError("--limit is 0.", hint="Use at least 1, or --all.")
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class ConfigError(SlurmddpError):
    """A setting, a flag or a file has a wrong value. Most such errors are raised before a job is queued."""

    exit_code = EXIT_CONFIG


class MismatchError(ConfigError):
    """The job was requested with other numbers of tasks, GPUs or hosts than this process finds."""


class UsageError(SlurmddpError):
    """An unknown command or flag, or a missing or wrong argument."""

    exit_code = EXIT_USAGE


class RunNotFoundError(SlurmddpError):
    """No run or sweep has the given name, or several have a name that begins with it."""

    exit_code = EXIT_NO_RUN


class RunStateError(SlurmddpError):
    """The run has finished, is ending, or is active, so the command changed nothing."""

    exit_code = EXIT_RUN_STATE


class LoginNodeError(SlurmddpError):
    """The login node can't be reached by ssh, or it can't run this slurmddp."""

    exit_code = EXIT_LOGIN_NODE
    last_line = ""
    """The last line that ssh or the host printed; empty if there was no line."""


class SlurmError(SlurmddpError):
    """SLURM is missing, did not answer, or refused a request. The message quotes SLURM."""

    exit_code = EXIT_SLURM
    may_be_queued = False
    """Whether sbatch may have queued the job in spite of the error. Then the run folder is kept."""


class CheckpointError(SlurmddpError):
    """A checkpoint can't be written or read, or it is missing or damaged."""


class RankFailure(SlurmddpError):
    """A rank failed. The message names the rank, its host, the cause and the last lines of its log."""


class UnhealthyNodeError(SlurmddpError):
    """The preflight found an unhealthy node, which the next attempt avoids."""

    exit_code = EXIT_UNHEALTHY_NODE


class StoppedAtCheckpoint(SlurmddpError, SystemExit):
    """The training stopped at a checkpoint on request. It resumes when the program is started again.

    A program that does not catch this error exits with code 75 and without a traceback, as after
    `sys.exit(75)`.
    """

    exit_code = EXIT_STOPPED
    is_printed = False
    """Whether the rank has already printed the message, because Python prints none for a SystemExit."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = EXIT_STOPPED


class NoProgressError(SlurmddpError):
    """The last attempts of a run made no progress, so another attempt would not help."""

    exit_code = EXIT_NO_PROGRESS


class SupersededError(SlurmddpError):
    """A later attempt has taken over the run. This attempt writes nothing more and is not requeued."""

    exit_code = EXIT_NO_PROGRESS


HINT = "hint: "
"""The beginning of a log line with advice about an error of a program."""


def plain(error: OSError) -> str:
    """Format an OSError as "No space left on device (FILE)", without the error number."""
    reason = str(error.strerror or error)
    if error.filename:
        reason += f" ({error.filename})"

    return reason


def unreadable(path: object, error: OSError) -> SlurmddpError:
    """Return the SlurmddpError for a file of a run that can't be read, because of an OSError."""
    return SlurmddpError(
        f"{path} can't be read: {error.strerror or error}.",
        hint="slurmddp did not cause this: restore the file from a copy, or correct its permissions.",
    )


def combine_exit_codes(codes: Iterable[int]) -> int:
    """Combine the exit codes of several ranks, nodes or runs into one.

    The codes 78, 79 and 76, in this order, take precedence over any other failure, which becomes 1. A failure
    takes precedence over 75 (stopped), and 75 over 0.
    """
    distinct = set(codes)
    for deliberate in (EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNHEALTHY_NODE):
        if deliberate in distinct:
            return deliberate

    if distinct - {EXIT_FINISHED, EXIT_STOPPED}:
        return EXIT_FAILED
    if EXIT_STOPPED in distinct:
        return EXIT_STOPPED
    return EXIT_FINISHED
