"""Derive the jobs of a sweep from one composed job, if they differ only in values that nothing reads here.

Such a value is the number `seed`, a number for a class that the ranks build (`optimizer.lr`), or the
arguments of a program, as `map_array` writes them. No check and no other value depends on it, so that the
first point with these keys stands for all others.
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
"""Nodes with arguments that are compared with this machine."""
_BUILT = [name for name in OPEN_NODES if not TOP[name].sections and name not in _CHECKED]
_NUMBER = re.compile(
    rf"\+{{0,2}}(?P<key>seed|(?:{'|'.join(_BUILT)})(?:\.[A-Za-z]\w*)+)="
    r"-?(?:0|[1-9][0-9]*)(?P<fraction>(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
)
"""A setting whose value is a number in Hydra's grammar, and that no check of a job reads."""
_ARGUMENTS = (ARGUMENTS, FREE_ARGUMENTS)


@dataclass(frozen=True)
class _Numbers:
    """A command line without its numbers and arguments, and these values by their keys."""

    others: tuple[str, ...]
    values: Mapping[str, int | float | list[str]]


class Variants:
    """Derives the jobs of command lines from the first job with the same keys."""

    def __init__(self, are_independent: Callable[[Sequence[str], Sequence[str]], bool]) -> None:
        """Begin without a job.

        Args:
            are_independent: whether no other value of the configuration depends on the keys (the second
                argument) of a command line (the first argument).
        """
        self._are_independent = are_independent
        self._first: dict[tuple[str, ...], Job | None] = {}

    def derive(self, words: Sequence[str]) -> Job | None:
        """Return the job of a command line; None if only its composition can give it."""
        given = _take_apart(words)
        job = self._first.get(given.others)
        return None if job is None else _with_values(job, words, given.values)

    def add(self, words: Sequence[str], job: Job) -> None:
        """Let a composed job stand for command lines with the same keys, if its numbers are independent."""
        given = _take_apart(words)
        if given.values and given.others not in self._first:
            # The size of an elastic job is written into its configuration after its name is known.
            alone = not job.elastic and self._are_independent(words, list(given.values))
            self._first[given.others] = job if alone else None


def _take_apart(words: Sequence[str]) -> _Numbers:
    others: list[str] = []
    values: dict[str, int | float | list[str]] = {}
    for word in words:
        setting, _, value = word.partition("=")
        number = _NUMBER.fullmatch(word)
        if number:
            values[number["key"]] = float(value) if number["fraction"] else int(value)
            others.append(setting)
        elif setting.lstrip("+") in _ARGUMENTS and "${" not in value:
            values[setting.lstrip("+")] = typed(value)
            others.append(setting)
        else:
            others.append(word)
    return _Numbers(tuple(others), values)


def _with_values(job: Job, words: Sequence[str], values: Mapping[str, int | float | list[str]]) -> Job:
    config = dict(job.program.config)
    for key, value in values.items():
        _put(config, key.split("."), check_value(value, TOP[key]) if key in TOP else value)
    run_dir = run_dir_of(job.run_dir.parent, job.name, config)
    return replace(
        job,
        run_name=run_dir.name,
        run_dir=run_dir,
        program=replace(job.program, config=config),
        overrides=tuple(words),
    )


def _put(config: dict[str, Any], way: Sequence[str], value: Any) -> None:
    """Set a value below `config`; the mappings on the way to it are copied, all others stay shared."""
    first, *rest = way
    if not rest:
        config[first] = value
        return
    config[first] = dict(config[first])
    _put(config[first], rest, value)
