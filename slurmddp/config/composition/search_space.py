"""Read a search from a command line: how many trials, and the values among which they choose.

The words are those of Hydra's sweeper for Optuna (https://hydra.cc/docs/plugins/optuna_sweeper/):
`hydra/sweeper=optuna hydra.sweeper.n_trials=20 optimizer.lr=tag(log,interval(1e-5,1e-2))`.
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

from slurmddp.config.composition.overrides import take_apart
from slurmddp.config.composition.sources import Sources
from slurmddp.config.composition.sweep import alternatives
from slurmddp.errors import ConfigError, near_matches

SWEEPER = "hydra/sweeper=optuna"
_PREFIX = "hydra.sweeper."
_PREFIXES = (_PREFIX, "hydra/sweeper/")
_DIRECTIONS = {"minimize": "min", "maximize": "max"}


@dataclass(frozen=True)
class Choices:
    """The settings among which a trial chooses one; a range has an order."""

    settings: tuple[str, ...]
    is_ordered: bool

    @property
    def edges(self) -> tuple[str, ...]:
        """The ends of a range, else all settings."""
        return (self.settings[0], self.settings[-1]) if self.is_ordered else self.settings

    def has(self, setting: str) -> bool:
        """Return whether a setting is one of these."""
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
        """The settings of the lowest and the highest number."""
        return self.setting(self.low), self.setting(self.high)

    def setting(self, value: float) -> str:
        """Return the setting of one number."""
        return f"{self.key}={value!r}"

    def has(self, setting: str) -> bool:
        """Return whether a setting gives a number of the interval."""
        try:
            return self.low <= float(setting.partition("=")[2]) <= self.high
        except ValueError:
            return False


@dataclass(frozen=True)
class Search:
    """The settings of a search.

    Attributes:
        words: the command line without the settings of the sweeper.
        parameters: the values of each word that stands for several.
        trials: how many points are tried.
        at_once: how many of them are started together.
        mode: whether the least (`min`) or the greatest value (`max`) is best; empty: as the metric says.
        metric: the metric that is compared; empty: as the report of a sweep chooses it.
        seed: of the sampler. The same seed and results give the same trials.
    """

    words: tuple[str, ...]
    parameters: Mapping[str, Choices | Interval]
    trials: int = 20
    at_once: int = 1
    mode: str = ""
    metric: str = ""
    seed: int = 0

    def point(self, chosen: Mapping[str, str]) -> list[str]:
        """Return the command line of one trial.

        Args:
            chosen: the setting of each word in `parameters`.
        """
        return [chosen.get(word, word) for word in self.words]

    def edges(self) -> list[list[str]]:
        """Return command lines that hold each choice, and the ends of each range, at least once."""
        first = {word: values.edges[0] for word, values in self.parameters.items()}
        others = [
            first | {word: edge} for word, values in self.parameters.items() for edge in values.edges[1:]
        ]
        return [self.point(chosen) for chosen in (first, *others)]

    def has(self, point: Sequence[str]) -> bool:
        """Return whether the command line of a trial is one of this search."""
        settings = {_key(word): word for word in point}
        fixed = {word for word in self.words if word not in self.parameters}
        return fixed <= set(point) and all(
            values.has(settings.get(_key(word), "")) for word, values in self.parameters.items()
        )

    def chosen(self, point: Sequence[str]) -> dict[str, str]:
        """Return the setting of each word in `parameters`, taken from the command line of a trial."""
        settings = {_key(one): one for one in point}
        return {word: settings[_key(word)] for word in self.parameters}


def is_search(words: Sequence[str]) -> bool:
    """Return whether a command line asks for a search."""
    return any(map(_is_sweeper, words))


def _is_sweeper(word: str) -> bool:
    return word.lstrip("+") == SWEEPER


def read(words: Sequence[str], project_dir: Path, sources: Sources) -> Search:
    """Return the search of a command line.

    Args:
        words: the command line.
        project_dir: the folder of the command, in which `glob(...)` looks for choices.
        sources: the flags that name other places of files.

    Raises:
        ConfigError: a setting of the sweeper is unknown or wrong, or no key has several values.
    """
    others = [word for word in words if not _is_sweeper(word)]
    own = [word for word in others if word.lstrip("+").startswith(_PREFIXES)]
    kept = [word for word in others if word not in own]
    settings = _settings(own)
    parameters = {word: found for word in kept if (found := _parameter(word, project_dir, sources))}
    if not parameters:
        raise ConfigError(
            f"{SWEEPER} searches, and no setting has several values.",
            hint="For example optimizer.lr=tag(log,interval(1e-5,1e-2)) or train.batch_size=32,64.",
        )
    keys = [_key(word) for word in kept]
    if twice := {key for word in parameters if keys.count(key := _key(word)) > 1}:
        raise ConfigError(f"{', '.join(sorted(twice))} is given twice.", hint="Give it once.")
    return Search(tuple(kept), parameters, **settings)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `Search` that the settings of the sweeper give."""
    found: dict[str, Any] = {}
    for word in words:
        key, _, text = word.lstrip("+").removeprefix(_PREFIX).partition("=")
        if key in _WHOLE:
            field, least = _WHOLE[key]
            if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
                raise ConfigError(f"{word!r} is not a whole number from {least} on.")
            found[field] = int(text)
        elif key == "direction":
            if text not in _DIRECTIONS:
                raise ConfigError(f"{word!r} is not a direction.", hint="Say minimize or maximize.")
            found["mode"] = _DIRECTIONS[text]
        elif key == "metric" and text:
            found["metric"] = text
        else:
            raise ConfigError(
                f"{word!r} is not a setting of a search.",
                hint=near_matches(key, [*_WHOLE, "direction", "metric"], prefix=_PREFIX),
            )
    return found


_WHOLE = {"n_trials": ("trials", 1), "n_jobs": ("at_once", 1), "sampler.seed": ("seed", 0)}
"""Settings that are whole numbers: the field of `Search`, and the least value."""


def _parameter(word: str, project_dir: Path, sources: Sources) -> Choices | Interval | None:
    """Return the values of one word; None if it is a plain setting."""
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except HydraException:
        override = None  # Such as the arguments of a program.
    value = override.value() if override is not None and override.is_sweep_override() else None
    if isinstance(value, IntervalSweep):
        given = take_apart(word)
        return _interval(word, f"{given.sign}{given.key}", value)
    if tags := getattr(value, "tags", None):
        raise ConfigError(
            f"{word!r} has the tag {', '.join(sorted(tags))}.", hint="Only an interval has one."
        )
    settings = tuple(alternatives(word, project_dir, sources))
    if settings == (word,):
        return None
    return Choices(settings, is_ordered=isinstance(value, RangeSweep) and not value.shuffle)


def _interval(word: str, key: str, value: IntervalSweep) -> Interval:
    low, high = value.start, value.end
    is_log = value.tags == {"log"}
    if value.tags and not is_log:
        raise ConfigError(
            f"{word!r} has the tag {', '.join(sorted(value.tags))}.", hint="An interval knows log."
        )
    if low is None or high is None or not -math.inf < low < high < math.inf:
        raise ConfigError(
            f"{word!r} needs two finite numbers, the smaller one first.", hint="Say interval(LOW,HIGH)."
        )
    if is_log and low <= 0:
        raise ConfigError(f"{word!r} begins at {low}, and a logarithm needs more than 0.")
    return Interval(key, low, high, is_log)
