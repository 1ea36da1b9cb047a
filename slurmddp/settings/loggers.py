"""Resolve the key `loggers` to import paths: slurmddp's loggers by name, others by `_target_`.

No logger is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches

AUTO = "auto"
"""The value of `loggers` that means TensorBoard if it is installed, and no logger otherwise."""
_ROOM = "slurmddp.training.loggers"


@dataclass(frozen=True, kw_only=True)
class NamedLogger:
    """A logger of slurmddp, which a configuration selects by a name such as `csv`."""

    target: str
    """Import path of the logger's class."""
    library: str = ""
    """The package that the logger needs; empty if it needs none."""
    options: tuple[str, ...] = ()
    """Arguments of the class that a configuration may give."""


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


def targets(value: Any, *, same_python: bool = True) -> dict[str, dict[str, Any]]:
    """Return the class and arguments of each logger that a value of the key `loggers` selects.

    Args:
        value: "auto", a name, a mapping, a list of names and mappings, or None. A mapping has a `name` with
            options of that logger, or a `_target_` with arguments of the user's class.
        same_python: whether this interpreter also runs the ranks. Otherwise the packages of the ranks
            are unknown and not checked.

    Returns:
        By the key of the logger, such as `loggers[0]`, a mapping with `_target_` for Hydra's `instantiate`.

    Raises:
        ConfigError: a name or an option is unknown, a logger is named twice, or its package is missing.
    """
    nodes: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for key, item in _items(value):
        if isinstance(item, Mapping) and "_target_" in item:
            nodes[key] = dict(item)
            continue

        name, options = _name_and_options(key, item)
        if name == AUTO and not is_installed("tensorboard"):
            continue
        if name == AUTO:
            name = "tensorboard"

        if name in names:
            raise ConfigError(f"`{key}` names {name} a second time.", hint="Name each logger once.")
        names.add(name)

        if same_python and NAMED[name].library:
            require(name)
        nodes[key] = {"_target_": NAMED[name].target, **options}

    return nodes


def require(name: str) -> None:
    """Raise ConfigError if the package that a logger needs is not installed in this Python."""
    library = NAMED[name].library
    if not is_installed(library):
        raise ConfigError(
            f"`loggers` names {name}, but the package {library} is not installed in {sys.executable}.",
            hint=f"Install it: pip install 'slurmddp[{name}]'. Or remove {name} from `loggers`.",
        )


def is_installed(library: str) -> bool:
    """Return whether this Python can import a package."""
    try:
        spec = importlib.util.find_spec(library)
    except (ImportError, ValueError):
        return False
    # A folder without __init__.py has a spec, too, but no origin. wandb writes into such a folder, ./wandb.
    return spec is not None and spec.origin is not None


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, item) for each logger: `loggers[0]`, `loggers[1]` for a list, else `loggers`."""
    if isinstance(value, (list, tuple)):
        yield from ((f"loggers[{number}]", item) for number, item in enumerate(value))
    elif value is not None:
        yield "loggers", value


def _name_and_options(key: str, item: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a logger of slurmddp.

    Raises:
        ConfigError: no logger has the name, or the logger does not have an option.
    """
    name = item
    options: dict[str, Any] = {}
    if isinstance(item, Mapping):
        options = {str(option): value for option, value in item.items()}
        name = options.pop("name", None)

    if not isinstance(name, str) or name not in (*NAMED, AUTO):
        known = ", ".join(NAMED)
        near = near_matches(str(name), NAMED, else_all=False)
        hint = f"{near} A class of your own is a mapping with `_target_`.".strip()
        raise ConfigError(f"`{key}` is {item!r}; known loggers are {known}.", hint=hint)

    allowed = NAMED[name].options if name != AUTO else ()
    for option in options:
        if option not in allowed:
            hint = f"{name} takes no options."
            if allowed:
                hint = near_matches(option, allowed)
            raise ConfigError(f"`{key}.{option}` is not an option of {name}.", hint=hint)
    return name, options
