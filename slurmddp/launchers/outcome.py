"""What follows when an attempt has ended: a pure decision, the same on a laptop and in the batch script.

The shell of the batch script decides by the same table; `tests/unit/outcome_table.py` holds both to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_NO_PROGRESS,
    EXIT_STOPPED,
    EXIT_UNFIT_NODE,
)


def newest_step(name: str) -> int:
    """Return the step in the name of the newest checkpoint; 0 where the name holds none."""
    digits = name.strip().removeprefix("step-")
    return int(digits) if digits.isdecimal() else 0


_STALLS = 2
"""So many attempts stopped at one step show that one more would stop there as well."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended and what comes next, in the words of the `ended` event."""

    outcome: str
    """`finished`, `stopped`, `failed`, `config`, `no_progress`, `cancelled`; not written: `superseded`."""
    next: str
    """`none` or `requeue`; a site that refuses to requeue gets a fresh submission instead."""


def decide(
    exit_code: int,
    *,
    failures: int,
    max_restarts: int,
    progressed: bool,
    cancelled: bool,
    requeue: bool,
    stalls: int = 0,
    without_progress: int = 0,
    max_requeues_without_progress: int = 3,
    progressed_before: bool = False,
) -> Outcome:
    """Return what an attempt's exit code means and whether the job runs again.

    `failures` counts the failed attempts so far, this one included if it failed; `progressed` says that the
    attempt left a newer checkpoint than it found; `requeue` that the policy lets a job run again at all.
    `stalls` counts the stopped attempts, this one included, that trained on from the checkpoint that is still
    the newest. `without_progress` counts the time limits in a row that left no newer checkpoint.
    `progressed_before`: an earlier attempt progressed, and none has failed without progress since.
    """
    if exit_code == EXIT_FINISHED:
        return Outcome("finished", "none")
    if exit_code == EXIT_CONFIG:
        return Outcome("config", "none")
    if exit_code == EXIT_NO_PROGRESS:
        return Outcome("no_progress", "none")
    if cancelled:
        return Outcome("cancelled", "none")
    stuck = stalls >= _STALLS or without_progress > max_requeues_without_progress
    if exit_code == EXIT_STOPPED and requeue and stuck:
        return Outcome("no_progress", "none")
    if exit_code == EXIT_STOPPED:
        return Outcome("stopped", "requeue" if requeue else "none")
    # A node that is not fit was found before the first step, and the next attempt gets another one.
    # A run that had progressed may have met a bad node: its first failure without progress is tried again.
    hopeful = progressed or progressed_before or exit_code == EXIT_UNFIT_NODE
    again = requeue and hopeful and failures <= max_restarts
    return Outcome("failed", "requeue" if again else "none")


def combine(codes: Iterable[int]) -> int:
    """Return the exit code of a group from those of its members: a refusal, else a failure, else a stop."""
    found = set(codes)
    for deliberate in (EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNFIT_NODE):
        if deliberate in found:
            return deliberate
    if found - {EXIT_FINISHED, EXIT_STOPPED}:
        return EXIT_FAILED
    return EXIT_STOPPED if EXIT_STOPPED in found else EXIT_FINISHED
