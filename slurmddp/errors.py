"""Every error that a person is meant to read, each with its exit code and a hint.

    SlurmddpError             1   the job failed
    +-- ConfigError          78   a wrong value: do not run me again
    |   +-- MismatchError    78   what was asked for and what was found here do not fit
    +-- RunNotFoundError     66   no run of that name
    +-- RunStateError        73   the run has finished, still stops, or runs: nothing was changed
    +-- SlurmError           69   SLURM is missing, does not answer, or refused
    +-- CheckpointError       1   a checkpoint can be neither written nor read
    +-- RankFailure           1   a rank died; says which one, where, and its last lines
    +-- UnfitNodeError       76   a node is not fit for training: run me again on others
    +-- StoppedAtCheckpoint  75   stopped on request: run me again and I go on
    +-- NoProgressError      79   two attempts got no further: do not run me again
    +-- SupersededError      79   a later attempt has the run: do not run me again

The command line itself exits with 2 for an unknown command or flag, as argparse does.
"""

from __future__ import annotations

from collections.abc import Iterable

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_RUN = 66
EXIT_SLURM = 69
EXIT_RUN_STATE = 73
EXIT_STOPPED = 75
EXIT_UNFIT_NODE = 76
EXIT_CONFIG = 78
EXIT_NO_PROGRESS = 79
GOOD_CODES = frozenset({EXIT_FINISHED, EXIT_STOPPED})
"""Codes of a rank that has not failed."""


class SlurmddpError(Exception):
    """Base of all errors raised on purpose: `message` says what was given and found, `hint` what to do."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class ConfigError(SlurmddpError):
    """A value that can't be right, found before anything was started or queued."""

    exit_code = EXIT_CONFIG


class MismatchError(ConfigError):
    """What was asked for (tasks, GPUs, hosts) is not what this process finds around it."""


class RunNotFoundError(SlurmddpError):
    """No run folder goes by the given name."""

    exit_code = EXIT_NO_RUN


class RunStateError(SlurmddpError):
    """The run has finished, still stops, or is queued or runs, so the command changed nothing."""

    exit_code = EXIT_RUN_STATE


class SlurmError(SlurmddpError):
    """SLURM is not there, did not answer, or refused a request; its own words are in the message."""

    exit_code = EXIT_SLURM
    may_be_queued = False
    """Whether sbatch may have queued a job in spite of the error: then its run folder must stay."""


class CheckpointError(SlurmddpError):
    """A checkpoint could not be written, or none could be read."""


class RankFailure(SlurmddpError):
    """A rank ended badly; the message names the rank, its host, the cause and its last lines."""


class UnfitNodeError(SlurmddpError):
    """The preflight found a node that is not fit for training, and the next attempt will not get it."""

    exit_code = EXIT_UNFIT_NODE


class StoppedAtCheckpoint(SlurmddpError, SystemExit):
    """The training stopped at a checkpoint on request and goes on when it is run again.

    A program that does not catch it exits with 75 and without a traceback, as after `sys.exit(75)`.
    """

    exit_code = EXIT_STOPPED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = EXIT_STOPPED


class NoProgressError(SlurmddpError):
    """The attempts of a run end where they began; running it again would not help."""

    exit_code = EXIT_NO_PROGRESS


class SupersededError(SlurmddpError):
    """A later attempt of the run has begun; this one must write nothing more and not be run again."""

    exit_code = EXIT_NO_PROGRESS


def near_matches(given: str, known: Iterable[str], *, prefix: str = "", else_all: bool = True) -> str:
    """Return a sentence with the names nearest to `given`; when none is near with all of them, or none.

    `prefix` is what a person types before the name that was meant.
    """
    import difflib  # The batch step never needs it, and has seconds to live.

    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(prefix + name for name in near)}?"
    return f"Known: {', '.join(names)}." if names and else_all else ""


def plain(error: OSError) -> str:
    """Return what the system refused, in its words and without its number, and for which file."""
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"
