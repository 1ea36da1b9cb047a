"""Find a person's own code: by its import path, or as the object itself.

The strategy, the launcher and the environment of a training are chosen by the name of a shipped one, by
`package.module.Class`, or by an object. Each has a protocol of few methods, which `build` checks.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slurmddp.errors import ConfigError, SlurmddpError, near_matches


def build(given: Any, known: Mapping[str, Any], protocol: type, *, key: str, **options: Any) -> Any:
    """Return the object that `given` names.

    Args:
        given: a name in `known`, the import path of a class or of an object, or one of these itself.
        known: the shipped classes and objects by name.
        protocol: the methods that the object must have.
        key: the name of the setting, for errors.
        options: arguments of the class.

    Returns:
        An instance of the class, or the object as it is.

    Raises:
        ConfigError: there is no such name or path, the class refuses its options, or a method is missing.

    Example:
        strategy = build("my_package.MyStrategy", STRATEGIES, Strategy, key="strategy")
    """
    found = given
    if isinstance(given, str):
        if given not in known and "." not in given:
            raise ConfigError(
                f"There is no {key} {given!r}.",
                hint=f"{near_matches(given, known)} One of your own is given as package.module.Name.",
            )
        found = known[given] if given in known else locate(given, key=key)
    if isinstance(found, type):
        try:
            found = found(**options)
        except TypeError as error:
            raise ConfigError(
                f"{key} {given!r} refused its options {options}: {error}.",
                hint=f"Its options are the arguments of {found.__module__}.{found.__qualname__}.",
            ) from error
    needed = methods(protocol)
    missing = [name for name in needed if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(
            f"{key} is {given!r}, which has no method {' and no '.join(missing)}.",
            hint=f"{protocol.__module__}.{protocol.__name__} describes its methods: {', '.join(needed)}.",
        )
    return found


def methods(protocol: type) -> list[str]:
    """Return the names of a protocol's methods, in the order of their definition."""
    return [
        name
        for name, value in vars(protocol).items()
        if callable(value) and (not name.startswith("_") or name == "__call__")
    ]


def locate(path: Any, *, key: str = "_target_") -> Callable[..., Any]:
    """Import the callable with the dotted path `path`; raises ConfigError that names `key`."""
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"{key} is {path!r}, which is not an import path.", hint="Write it as `package.module.ClassName`."
        )
    module, names = _import_longest(path, key)
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            raise _no_attribute(path, found, name, key)
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(
            f"{key} is {path!r}, a {type(found).__name__} that can't be called.",
            hint="Name a class or a function.",
        )
    return found  # type: ignore[no-any-return]


def _import_longest(path: str, key: str) -> tuple[ModuleType, list[str]]:
    """Import the longest prefix of `path` that is a module; return the module and the remaining names."""
    parts = path.split(".")
    if len(parts) == 1:
        return builtins, parts
    module: ModuleType | None = None
    for length in range(1, len(parts)):
        name = ".".join(parts[:length])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise _broken_module(path, name, error, key) from error
            if module is None or not hasattr(module, parts[length - 1]):
                raise _no_module(path, name, module, key) from error
            return module, parts[length - 1 :]
        except SlurmddpError:
            raise
        except Exception as error:
            raise _broken_module(path, name, error, key) from error
    return sys.modules[".".join(parts[:-1])], parts[-1:]


def _no_module(path: str, name: str, parent: ModuleType | None, key: str) -> ConfigError:
    last = name.rpartition(".")[2]
    found = f"module {parent.__name__} has no {last}" if parent else f"there is no module {name}"
    hint = near_matches(last, _public(parent)) if parent else src_layout_hint(name)
    return ConfigError(
        f"{key} is {path!r}, but {found}.",
        hint=hint or "Modules are found beside your conf/ folder and in the installed packages.",
    )


def src_layout_hint(module: str, project_dir: Path | None = None) -> str:
    """Return the advice for a missing module that lies in `src/` of the project; empty if it does not.

    Args:
        module: the dotted name.
        project_dir: the project; None: the working folder.
    """
    name, src = module.partition(".")[0], (project_dir or Path.cwd()) / "src"
    place = next((path for path in (src / name, src / f"{name}.py") if path.exists()), None)
    if place is None:
        return ""
    return (
        f"src/{place.name} is in this project, but src/ is not on the search path. "
        "Install the project where the job runs: `pip install -e .`. Or set PYTHONPATH=src."
    )


def _broken_module(path: str, name: str, error: Exception, key: str) -> ConfigError:
    return ConfigError(
        f"{key} is {path!r}, but importing {name} failed: {type(error).__name__}: {error}.",
        hint=f"`python -c 'import {name}'` shows the whole error.",
    )


def _no_attribute(path: str, owner: Any, name: str, key: str) -> ConfigError:
    where = getattr(owner, "__name__", type(owner).__name__)
    return ConfigError(
        f"{key} is {path!r}, but {where} has no {name!r}.", hint=near_matches(name, _public(owner))
    )


def _public(owner: Any) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]
