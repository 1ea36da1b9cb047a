"""Read a search from a command line: the number of trials, and the values among which trials choose.

The settings have the names that Hydra's sweeper for Optuna gives them
(https://hydra.cc/docs/plugins/optuna_sweeper/): `hydra/sweeper=optuna hydra.sweeper.n_trials=20
optimizer.lr=tag(log,interval(1e-5,1e-2))`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, RangeSweep
from hydra.errors import HydraException

from slurmddp.config.composition.overrides import parse_setting
from slurmddp.config.composition.sources import Sources
from slurmddp.config.composition.sweep import alternatives
from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches

SWEEPER = "hydra/sweeper=optuna"
_PREFIX = "hydra.sweeper."
_PREFIXES = (_PREFIX, "hydra/sweeper/")
_DIRECTIONS = {"minimize": "min", "maximize": "max"}


@dataclass(frozen=True)
class Choices:
    """The settings of one key, such as `seed=1` and `seed=2`, of which each trial gets one."""

    settings: tuple[str, ...]
    is_ordered: bool
    """Whether the settings are the numbers of a range, in the order of the range."""

    @property
    def edges(self) -> tuple[str, ...]:
        """The first and the last setting of an ordered range; all settings if they have no order."""
        if self.is_ordered:
            return self.settings[0], self.settings[-1]
        return self.settings

    def has(self, setting: str) -> bool:
        """Return whether a trial may get the setting."""
        return setting in self.settings


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`, both included; whole numbers if both are integers."""

    key: str
    low: float
    high: float
    is_log: bool

    @property
    def edges(self) -> tuple[str, ...]:
        """The settings of the smallest and the largest number."""
        return self.setting(self.low), self.setting(self.high)

    def setting(self, value: float) -> str:
        """Return the setting that gives the number to the key: `optimizer.lr=0.01`."""
        return f"{self.key}={value!r}"

    def has(self, setting: str) -> bool:
        """Return whether a setting gives the key a number of the interval."""
        try:
            return self.low <= float(setting.partition("=")[2]) <= self.high
        except ValueError:
            return False


@dataclass(frozen=True)
class Search:
    """A search: its command line, the values among which trials choose, and the metric to compare.

    Attributes:
        overrides: the words of the command line, without the settings of the sweeper.
        parameters: for each word of `overrides` with several values, such as `seed=1,2`, these values.
        trials: the number of points to try.
        at_once: the number of trials that are started together.
        mode: whether the smallest (`min`) or the largest value (`max`) is best; empty if the metric decides.
        metric: the metric that is compared; empty means the metric that the report of a sweep compares.
        seed: seed of the sampler. Equal seeds and results give equal trials.
    """

    overrides: tuple[str, ...]
    parameters: Mapping[str, Choices | Interval]
    trials: int = 20
    at_once: int = 1
    mode: str = ""
    metric: str = ""
    seed: int = 0

    def point(self, chosen: Mapping[str, str]) -> list[str]:
        """Return the settings of one trial.

        Args:
            chosen: for each word of `parameters`, the setting that takes its place.
        """
        return [chosen.get(word, word) for word in self.overrides]

    def edges(self) -> list[list[str]]:
        """Return a few points to check before a search: together they have all choices and ends of ranges.

        Each point is given by its settings.
        """
        first = {word: values.edges[0] for word, values in self.parameters.items()}
        others = [
            first | {word: edge} for word, values in self.parameters.items() for edge in values.edges[1:]
        ]
        return [self.point(chosen) for chosen in (first, *others)]

    def has(self, point: Sequence[str]) -> bool:
        """Return whether the search may try a point, which is given by its settings."""
        settings = {_key(word): word for word in point}
        fixed = {word for word in self.overrides if word not in self.parameters}
        if not fixed <= set(point):
            return False
        return all(values.has(settings.get(_key(word), "")) for word, values in self.parameters.items())

    def chosen(self, point: Sequence[str]) -> dict[str, str]:
        """Return the settings that a point has in place of the words of `parameters`."""
        settings = {_key(setting): setting for setting in point}
        return {word: settings[_key(word)] for word in self.parameters}


def is_search(overrides: Sequence[str]) -> bool:
    """Return whether a command line asks for a search."""
    return any(map(_is_sweeper, overrides))


def _is_sweeper(word: str) -> bool:
    """Return whether a word chooses the sweeper for searches."""
    return word.lstrip("+") == SWEEPER


def read(overrides: Sequence[str], project_dir: Path, sources: Sources) -> Search:
    """Return the search of a command line.

    Args:
        overrides: the settings of the command line.
        project_dir: the folder of the command, in which `glob(...)` looks for choices.
        sources: the folders and the file of the configuration.

    Raises:
        ConfigError: a setting of the sweeper is unknown or wrong, no setting has several values, or a key
            with several values is given twice.
    """
    others = [word for word in overrides if not _is_sweeper(word)]
    of_sweeper = [word for word in others if word.lstrip("+").startswith(_PREFIXES)]
    kept = [word for word in others if word not in of_sweeper]
    settings = _settings(of_sweeper)

    parameters: dict[str, Choices | Interval] = {}
    for word in kept:
        values = _parameter(word, project_dir, sources)
        if values is not None:
            parameters[word] = values
    if not parameters:
        raise ConfigError(
            f"{SWEEPER} starts a search, but no setting has several values.",
            hint="For example optimizer.lr=tag(log,interval(1e-5,1e-2)) or train.batch_size=32,64.",
        )

    keys = [_key(word) for word in kept]
    twice = {key for key in map(_key, parameters) if keys.count(key) > 1}
    if twice:
        raise ConfigError(f"{', '.join(sorted(twice))} is given twice.", hint="Give it once.")
    return Search(tuple(kept), parameters, **settings)


def _key(word: str) -> str:
    """Return the key of a setting, without `+`."""
    return word.partition("=")[0].lstrip("+")


def _settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `Search` that are given by settings of the sweeper."""
    fields: dict[str, Any] = {}
    for word in overrides:
        key, _, text = word.lstrip("+").removeprefix(_PREFIX).partition("=")
        if key in _WHOLE_NUMBERS:
            field, minimum = _WHOLE_NUMBERS[key]
            if not re.fullmatch("[0-9]{1,9}", text) or int(text) < minimum:
                raise ConfigError(f"{word!r} needs a whole number of at least {minimum}.")
            fields[field] = int(text)
        elif key == "direction":
            if text not in _DIRECTIONS:
                raise ConfigError(
                    f"{word!r} is not a direction of a search.", hint="Use minimize or maximize."
                )
            fields["mode"] = _DIRECTIONS[text]
        elif key == "metric" and text:
            fields["metric"] = text
        else:
            raise ConfigError(
                f"{word!r} is not a setting of a search.",
                hint=near_matches(key, [*_WHOLE_NUMBERS, "direction", "metric"], prefix=_PREFIX),
            )

    return fields


_WHOLE_NUMBERS = {"n_trials": ("trials", 1), "n_jobs": ("at_once", 1), "sampler.seed": ("seed", 0)}
"""Settings that are whole numbers, with the field of `Search` and the smallest value."""


def _parameter(word: str, project_dir: Path, sources: Sources) -> Choices | Interval | None:
    """Return the values of a word such as `seed=1,2`; None if the word has a single value."""
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except HydraException:
        # Hydra's grammar can't read every word, for example not the arguments of a program.
        override = None

    value = None
    if override is not None and override.is_sweep_override():
        value = override.value()
    if isinstance(value, IntervalSweep):
        setting = parse_setting(word)
        return _interval(word, f"{setting.sign}{setting.key}", value)

    tags = getattr(value, "tags", None)
    if tags:
        raise ConfigError(
            f"{word!r} has the tag {', '.join(sorted(tags))}.", hint="Only an interval may have a tag."
        )

    settings = tuple(alternatives(word, project_dir, sources))
    if settings == (word,):
        return None
    return Choices(settings, is_ordered=isinstance(value, RangeSweep) and not value.shuffle)


def _interval(word: str, key: str, value: IntervalSweep) -> Interval:
    """Return the interval of a word such as `lr=interval(0,1)`.

    Raises:
        ConfigError: the ends are missing, infinite, in the wrong order or not positive for the tag `log`, or
            the tag is unknown.
    """
    low = value.start
    high = value.end
    is_log = value.tags == {"log"}
    if value.tags and not is_log:
        raise ConfigError(
            f"{word!r} has the tag {', '.join(sorted(value.tags))}.",
            hint="The only tag of an interval is log.",
        )
    if low is None or high is None or not -math.inf < low < high < math.inf:
        raise ConfigError(
            f"{word!r} needs two finite numbers, the smaller number first.", hint="Use interval(LOW,HIGH)."
        )
    if is_log and low <= 0:
        raise ConfigError(
            f"{word!r} begins at {low}, but the ends of a logarithmic interval must be above 0."
        )
    return Interval(key, low, high, is_log)
