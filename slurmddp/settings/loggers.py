"""Name the loggers of a run: slurmddp's by their names, others by `_target_`. None of them is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurmddp.errors import ConfigError, near_matches

AUTO = "auto"
"""TensorBoard if it is installed, else nothing."""
_ROOM = "slurmddp.training.loggers"


@dataclass(frozen=True, kw_only=True)
class NamedLogger:
    """A logger of slurmddp."""

    target: str
    """Import path of its class."""
    library: str = ""
    """The package that it needs; empty: none."""
    options: tuple[str, ...] = ()
    """Arguments of the class."""


NAMED: Mapping[str, NamedLogger] = {
    "tensorboard": NamedLogger(target=f"{_ROOM}.tensorboard.TensorBoardLogger", library="tensorboard"),
    "csv": NamedLogger(target=f"{_ROOM}.csv.CsvLogger"),
    "wandb": NamedLogger(
        target=f"{_ROOM}.wandb.WandbLogger",
        library="wandb",
        options=("project", "entity", "group", "tags", "notes", "mode"),
    ),
    "mlflow": NamedLogger(
        target=f"{_ROOM}.mlflow.MlflowLogger",
        library="mlflow",
        options=("experiment", "tracking_uri", "tags"),
    ),
}


def targets(value: Any, *, here: bool = True) -> dict[str, dict[str, Any]]:
    """Return the loggers that a value of `loggers` names.

    Args:
        value: "auto", a name, a mapping, a list of names and mappings, or None. A mapping has a `name` with
            options of that logger, or a `_target_` with arguments of a person's class.
        here: whether this interpreter runs the ranks. Packages of another interpreter can't be seen here.

    Returns:
        For each logger its key, such as `loggers[0]`, and a mapping with `_target_` for `instantiate`.

    Raises:
        ConfigError: a name or an option is unknown, a logger stands twice, or its library is missing.
    """
    found: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for key, one in _items(value):
        if isinstance(one, Mapping) and "_target_" in one:
            found[key] = dict(one)
            continue
        name, options = _named(key, one)
        if name == AUTO and not is_installed("tensorboard"):
            continue
        name = "tensorboard" if name == AUTO else name
        if name in seen:
            raise ConfigError(f"`{key}` names {name} a second time.", hint="Name each logger once.")
        seen.add(name)
        if here and NAMED[name].library:
            require(name)
        found[key] = {"_target_": NAMED[name].target, **options}
    return found


def require(name: str) -> None:
    """Raise ConfigError if the library of a logger is not installed in this Python."""
    library = NAMED[name].library
    if not is_installed(library):
        raise ConfigError(
            f"`loggers` names {name}, but the package {library} is not installed in {sys.executable}.",
            hint=f"Install it there: pip install 'slurmddp[{name}]'. Or leave {name} out of `loggers`.",
        )


def is_installed(library: str) -> bool:
    """Return whether a package can be imported here; a folder of wandb's output is not a package."""
    try:
        spec = importlib.util.find_spec(library)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each logger with its key."""
    if isinstance(value, (list, tuple)):
        yield from ((f"loggers[{number}]", one) for number, one in enumerate(value))
    elif value is not None:
        yield "loggers", value


def _named(key: str, one: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a logger and its options."""
    options = {str(name): option for name, option in one.items()} if isinstance(one, Mapping) else {}
    name = options.pop("name", None) if isinstance(one, Mapping) else one
    if not isinstance(name, str) or name not in (*NAMED, AUTO):
        known = ", ".join(NAMED)
        near = near_matches(str(name), NAMED, else_all=False)
        hint = f"{near} A class of your own is a mapping with `_target_`.".strip()
        raise ConfigError(f"`{key}` is {one!r}; known loggers are {known}.", hint=hint)
    allowed = NAMED[name].options if name != AUTO else ()
    for option in options:
        if option not in allowed:
            hint = near_matches(option, allowed) if allowed else f"{name} takes no options."
            raise ConfigError(f"`{key}.{option}` is not an option of {name}.", hint=hint)
    return name, options
