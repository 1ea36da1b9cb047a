"""Build a sweep's jobs from its first composed job when the points differ only in values that no check reads.

Such a value is the number `seed`, a number for a class that the ranks build (`optimizer.lr`), or the
arguments of a program, as `map_array` writes them. If no other value refers to it, the job of the first point
with these keys gives the jobs of all other points.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmddp.config.same_run import run_dir_of
from slurmddp.settings.arguments import ARGUMENTS, FREE_ARGUMENTS, typed
from slurmddp.settings.check_values import check_value
from slurmddp.settings.keys import OPEN_NODES, TOP
from slurmddp.settings.spec import Job

_CHECKED = ("data",)
"""Nodes with arguments that a check compares with this machine, such as a path: they can't vary."""
_BUILT = [name for name in OPEN_NODES if not TOP[name].sections and name not in _CHECKED]
_NUMBER = re.compile(
    rf"\+{{0,2}}(?P<key>seed|(?:{'|'.join(_BUILT)})(?:\.[A-Za-z]\w*)+)="
    r"-?(?:0|[1-9][0-9]*)(?P<fraction>(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
)
"""A setting with a number in Hydra's grammar, for a key that no check reads."""
_ARGUMENTS = (ARGUMENTS, FREE_ARGUMENTS)


@dataclass(frozen=True)
class _Variant:
    """A command line, split into the values that may differ between the points of a sweep and the rest."""

    pattern: tuple[str, ...]
    """The settings, in which only the keys of varying values are left."""
    values: Mapping[str, int | float | list[str]]
    """The varying values by key: numbers, and arguments of a program."""


class Variants:
    """A store of composed jobs, from which jobs of similar command lines are derived without Hydra."""

    def __init__(self, are_independent: Callable[[Sequence[str], Sequence[str]], bool]) -> None:
        """Create an empty store.

        Args:
            are_independent: takes the settings of a command line and some of their keys. It returns whether
                all other values of the configuration stay the same if the values of these keys change.
        """
        self._are_independent = are_independent
        self._jobs: dict[tuple[str, ...], Job | None] = {}
        """The first job of each pattern; None if other values depend on the varying values."""

    def derive(self, overrides: Sequence[str]) -> Job | None:
        """Return the job of a command line; None if Hydra must compose it."""
        variant = _split(overrides)
        job = self._jobs.get(variant.pattern)
        if job is None:
            return None
        return _with_values(job, overrides, variant.values)

    def add(self, overrides: Sequence[str], job: Job) -> None:
        """Store a composed job, from which `derive` builds the jobs that differ only in varying values.

        Nothing can be derived from the job if it has no varying values, or if other values depend on them.
        """
        variant = _split(overrides)
        if not variant.values or variant.pattern in self._jobs:
            return

        # An elastic job gets `train.global_batch` after its name is computed. A derived job would compute its
        # name with this value, and so get another name than a composed job.
        is_usable = not job.elastic and self._are_independent(overrides, list(variant.values))
        self._jobs[variant.pattern] = job if is_usable else None


def _split(overrides: Sequence[str]) -> _Variant:
    """Split a command line into varying values and the rest."""
    pattern: list[str] = []
    values: dict[str, int | float | list[str]] = {}
    for word in overrides:
        setting, _, value = word.partition("=")
        number = _NUMBER.fullmatch(word)
        if number:
            values[number["key"]] = float(value) if number["fraction"] else int(value)
            pattern.append(setting)
        elif setting.lstrip("+") in _ARGUMENTS and "${" not in value:
            values[setting.lstrip("+")] = typed(value)
            pattern.append(setting)
        else:
            pattern.append(word)

    return _Variant(tuple(pattern), values)


def _with_values(job: Job, overrides: Sequence[str], values: Mapping[str, int | float | list[str]]) -> Job:
    """Return a job with other values of some keys, and so with another name and run folder."""
    config = dict(job.program.config)
    for key, value in values.items():
        if key in TOP:
            value = check_value(value, TOP[key])
        _put(config, key.split("."), value)

    run_dir = run_dir_of(job.run_dir.parent, job.name, config)
    return replace(
        job,
        run_name=run_dir.name,
        run_dir=run_dir,
        program=replace(job.program, config=config),
        overrides=tuple(overrides),
    )


def _put(config: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set the value of a nested key in `config`.

    The inner mappings on the path are replaced by copies, because other jobs share them.
    """
    first, *rest = path
    if not rest:
        config[first] = value
        return

    config[first] = dict(config[first])
    _put(config[first], rest, value)
