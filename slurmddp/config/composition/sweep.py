"""Expand a command line with sweeps to the settings of each point, in the order of Hydra's basic sweeper.

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
from slurmddp.config.composition.overrides import options, parse_setting
from slurmddp.config.composition.sources import Sources
from slurmddp.errors import ConfigError
from slurmddp.settings.arguments import EVERY_ARGUMENTS, choices

_AS_TYPED = ("program.script", *EVERY_ARGUMENTS, "hydra.searchpath")
"""Keys whose values may hold commas; a sweep over arguments is written `choice(...)`."""
_BASIC = "hydra/sweeper=basic"


def points(overrides: Sequence[str], project_dir: Path, sources: Sources) -> list[list[str]]:
    """Return the settings of each point of a sweep: all combinations of the values in the command line.

    Args:
        overrides: the settings of the command line.
        project_dir: the folder of the command, in which `glob(...)` looks for choices.
        sources: the folders and the file of the configuration.

    Raises:
        ConfigError: a word has no values, or is an interval, which has no list of values.
    """
    each = [alternatives(word, project_dir, sources) for word in overrides if word.lstrip("+") != _BASIC]
    return [list(point) for point in itertools.product(*each)]


def alternatives(word: str, project_dir: Path, sources: Sources) -> list[str]:
    """Return the settings to which a word expands: `a=1` and `a=2` for `a=1,2`.

    A word with a single value, or one that Hydra's grammar can't read, is returned unchanged.

    Args:
        word: the word of the command line.
        project_dir: as for `points`.
        sources: as for `points`.

    Raises:
        ConfigError: the word has no values, is an interval, or has a sweep among its values.
    """
    key, _, typed = word.partition("=")
    if key.lstrip("+") in _AS_TYPED:
        values = choices(typed) if key.lstrip("+") in EVERY_ARGUMENTS else None
        return [word] if values is None else _settings(word, key, values)

    setting = parse_setting(word)
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except HydraException:
        # Returned unchanged, because the later composition raises an error that explains more.
        return [word]
    if not override.is_sweep_override():
        return [word]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{word!r} is an interval, but a sweep needs a list of values. Only a search tries intervals.",
            hint=f"Use {setting.key}=range(START,STOP,STEP), or add hydra/sweeper=optuna for a search.",
        )

    sweep = override.value()
    if any(isinstance(value, Sweep) for value in getattr(sweep, "list", ())):
        raise ConfigError(
            f"{word!r} has a sweep among its values.",
            hint="Write a list of plain values (a,b), or a single sweep such as range(1,4).",
        )

    if isinstance(sweep, Glob):
        roots = make_plan([], project_dir, sources).roots
        values = sweep.filter(list(options(roots, setting.key)))
    else:
        values = list(override.sweep_string_iterator())
    return _settings(word, f"{setting.sign}{setting.key}", values)


def _settings(word: str, key: str, values: Sequence[str]) -> list[str]:
    """Return a setting of the key for each value; raise ConfigError if there are no values."""
    if not values:
        raise ConfigError(f"{word!r} has no values.", hint="Give at least one.")
    return [f"{key}={value}" for value in values]
