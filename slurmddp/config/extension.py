"""Decide how an existing run may train longer: by which keys, and to which lengths."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.arguments import FREE_ARGUMENTS, RESUME_ARGUMENTS
from slurmddp.settings.spec import is_foreign, is_own_trainer
from slurmddp.slurm.units import parse_duration_s

STEPS = "train.steps"
MAX_TIME = "train.max_time"
LENGTHS = (STEPS, MAX_TIME)
"""The keys that decide when slurmddp's trainer ends."""


def keys_that_extend(program: Any, *, is_out_of_time: bool) -> tuple[str, ...]:
    """Return the keys that extend a finished run: one of them must change.

    Args:
        program: the section `program` of the run's configuration.
        is_out_of_time: whether `train.max_time` ended the run before its last step.

    Returns:
        `train.steps` or `train.max_time` for slurmddp's trainer, and the arguments for a script. Empty for
        the user's own function, because slurmddp does not know which argument decides its length.
    """
    if is_own_trainer(program):
        return (MAX_TIME,) if is_out_of_time else (STEPS,)
    if is_foreign(program):
        return RESUME_ARGUMENTS, FREE_ARGUMENTS
    return ()


def refuse_shorter(
    folder: RunFolder, before: Mapping[str, Any], after: Mapping[str, Any], given: Collection[str]
) -> None:
    """Raise ConfigError if changes would make a run shorter, or would not make a finished run longer.

    If a run has not finished, its length may also stay as it is. So the command that extended the run can be
    repeated to resume it.

    Args:
        folder: the run folder.
        before: the stored configuration of the run.
        after: the checked configuration with the changes.
        given: the keys of the changes; only `train.steps` and `train.max_time` are compared.
    """
    for key in (key for key in LENGTHS if key in given):
        old = _value(before, key)
        new = _value(after, key)
        if _length(key, new) > _length(key, old):
            continue
        if _length(key, new) == _length(key, old) and not _has_finished(folder):
            continue

        longer = f"Give more than {old}"
        if key == MAX_TIME:
            longer = f"Give {key}=null or more than {old}"
        raise ConfigError(
            f"{key}={_shown(new)} does not extend {folder.name}, whose {key} is {_shown(old)}.",
            hint=f"{longer}. `slurmddp rerun {folder.name} {key}={_shown(new)}` is a new run of that length.",
        )


def _length(key: str, value: Any) -> float:
    """Return a number of steps or seconds; infinity if the value is null, which means no time limit."""
    if key == STEPS:
        return float(value)
    if value is None:
        return math.inf
    return parse_duration_s(value, key)


def _shown(value: Any) -> str:
    """Return a length as the value of a setting: `null` for no limit."""
    return "null" if value is None else str(value)


def _has_finished(folder: RunFolder) -> bool:
    """Return whether the last attempt of a run has finished all steps."""
    newest = read_history(folder).newest
    return newest is not None and newest.outcome == "finished"


def lengths_beyond(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys of `LENGTHS` whose values are greater in the stored configuration.

    Args:
        stored: the configuration in the folder of a run.
        given: the configuration of a new job with the name of this run.

    Returns:
        For each key (key, stored value, given value), the values as text. Empty for a run of another program
        than slurmddp's trainer.
    """
    if not is_own_trainer(stored.get("program")):
        return []

    longer = []
    for key in LENGTHS:
        old = _value(stored, key)
        new = _value(given, key)
        if _length(key, old) > _length(key, new):
            longer.append((key, _shown(old), _shown(new)))

    return longer


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key such as `train.steps`; None if a run of an earlier version lacks the key."""
    return config["train"].get(key.removeprefix("train."))
