"""Expand a command line with sweeps to the settings of its points, in the order of Hydra's basic sweeper.

The sweeps are Hydra's: `key=a,b`, `choice(...)`, `range(...)`, `glob(...)`, with `sort` and `shuffle`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Sweep
from hydra.errors import HydraException

from slurmddp.config.composition.compose import make_plan
from slurmddp.config.composition.overrides import options, take_apart
from slurmddp.config.composition.sources import Sources
from slurmddp.errors import ConfigError
from slurmddp.settings.arguments import EVERY_ARGUMENTS, choices

_AS_TYPED = ("program.script", *EVERY_ARGUMENTS, "hydra.searchpath")
"""Keys whose commas belong to their value; arguments are swept by `choice(...)` alone."""
_BASIC = "hydra/sweeper=basic"


def points(words: Sequence[str], project_dir: Path, sources: Sources) -> list[list[str]]:
    """Return the settings of each point.

    Args:
        words: the command line.
        project_dir: the folder of the command, in which `glob(...)` looks for choices.
        sources: the flags that name other places of files.

    Raises:
        ConfigError: a sweep has no values, or has no end.
    """
    each = [alternatives(word, project_dir, sources) for word in words if word.lstrip("+") != _BASIC]
    return [list(point) for point in itertools.product(*each)]


def alternatives(word: str, project_dir: Path, sources: Sources) -> list[str]:
    """Return the settings that one word stands for, the word itself if it is no sweep.

    Raises:
        ConfigError: the word has no values, or is an interval.
    """
    key, _, typed = word.partition("=")
    if key.lstrip("+") in _AS_TYPED:
        values = choices(typed) if key.lstrip("+") in EVERY_ARGUMENTS else None
        return [word] if values is None else _each(word, key, values)
    given = take_apart(word)
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except HydraException:
        return [word]  # Composing explains the error.
    if not override.is_sweep_override():
        return [word]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{word!r} has no number of values: an interval is for a search that learns from results.",
            hint=f"Say {given.key}=range(START,STOP,STEP), or add hydra/sweeper=optuna.",
        )
    found = override.value()
    if any(isinstance(one, Sweep) for one in getattr(found, "list", ())):
        raise ConfigError(f"{word!r} has a sweep among its values.", hint="Give values alone, or one sweep.")
    if isinstance(found, Glob):
        roots = make_plan([], project_dir, sources).roots
        values = found.filter(list(options(roots, given.key)))
    else:
        values = list(override.sweep_string_iterator())
    return _each(word, f"{given.sign}{given.key}", values)


def _each(word: str, key: str, values: Sequence[str]) -> list[str]:
    """Return the setting of each value; raises ConfigError if there are none."""
    if not values:
        raise ConfigError(f"{word!r} has no values.", hint="Give at least one.")
    return [f"{key}={value}" for value in values]
