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
"""Nodes with arguments that a check compares with this machine, such as a path."""
_BUILT = [name for name in OPEN_NODES if not TOP[name].sections and name not in _CHECKED]
_NUMBER = re.compile(
    rf"\+{{0,2}}(?P<key>seed|(?:{'|'.join(_BUILT)})(?:\.[A-Za-z]\w*)+)="
    r"-?(?:0|[1-9][0-9]*)(?P<fraction>(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
)
"""A setting with a number in Hydra's grammar, for a key that no check reads."""
_ARGUMENTS = (ARGUMENTS, FREE_ARGUMENTS)


@dataclass(frozen=True)
class _Variant:
    """A command line, split into values that may vary and the rest."""

    pattern: tuple[str, ...]
    """The settings, in which only the keys of varying values are left."""
    values: Mapping[str, int | float | list[str]]
    """The varying values by key: numbers, and arguments of a program."""


class Variants:
    """The jobs of command lines, derived from the first composed job with the same keys."""

    def __init__(self, are_independent: Callable[[Sequence[str], Sequence[str]], bool]) -> None:
        """Begin without a job.

        Args:
            are_independent: takes a command line and keys; returns whether no other value of the
                configuration depends on the values of these keys.
        """
        self._are_independent = are_independent
        self._jobs: dict[tuple[str, ...], Job | None] = {}
        """The first job of each pattern; None if other values depend on the varying ones."""

    def derive(self, overrides: Sequence[str]) -> Job | None:
        """Return the job of a command line; None if the command line must be composed."""
        variant = _split(overrides)
        job = self._jobs.get(variant.pattern)
        if job is None:
            return None
        return _with_values(job, overrides, variant.values)

    def add(self, overrides: Sequence[str], job: Job) -> None:
        """Keep a composed job for command lines of its pattern, if no value depends on varying values."""
        variant = _split(overrides)
        if not variant.values or variant.pattern in self._jobs:
            return

        # The size of an elastic job is written into its configuration after its name is known.
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
    """Return a job with other values, and so with another name and run folder."""
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
    """Set a value below `config`; mappings on the path are copied, because jobs share all mappings."""
    first, *rest = path
    if not rest:
        config[first] = value
        return

    config[first] = dict(config[first])
    _put(config[first], rest, value)
