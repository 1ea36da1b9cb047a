"""Find user code by its import path.

A strategy, a launcher or an environment is chosen by the name of a shipped class, by the import path of a
class, or as an object. Each of the three kinds has a Protocol class. `build` checks that the object has its
methods.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slurmddp.errors import ConfigError, SlurmddpError
from slurmddp.near_matches import near_matches


def build(given: Any, known: Mapping[str, Any], protocol: type, *, key: str, **options: Any) -> Any:
    """Return the strategy, launcher or environment that a setting chooses.

    Args:
        given: the value of the setting: a name in `known`, the import path of a class or an object, a class,
            or an object.
        known: the classes and objects that slurmddp ships, by name.
        protocol: the Protocol class with the methods that the object must have.
        key: the name of the setting, for errors.
        options: the keyword arguments of the class; an object ignores them.

    Returns:
        An instance of the class, or the given object.

    Raises:
        ConfigError: no such name or import path exists, the class refuses its options, or a method is
            missing.

    Example:
        strategy = build("my_package.MyStrategy", STRATEGIES, Strategy, key="strategy")
    """
    chosen = given
    if isinstance(given, str):
        if given not in known and "." not in given:
            raise ConfigError(
                f"There is no {key} {given!r}.",
                hint=f"{near_matches(given, known)} Choose your own by its import path: package.module.Name.",
            )

        chosen = known[given] if given in known else locate(given, key=key)

    if isinstance(chosen, type):
        try:
            chosen = chosen(**options)
        except TypeError as error:
            raise ConfigError(
                f"{key} {given!r} does not accept its options {options}: {error}.",
                hint=f"Its options are the arguments of {chosen.__module__}.{chosen.__qualname__}.",
            ) from error

    required = methods(protocol)
    missing = [name for name in required if not callable(getattr(chosen, name, None))]
    if missing:
        raise ConfigError(
            f"{key} is {given!r}, which has no method {' and no '.join(missing)}.",
            hint=f"{protocol.__module__}.{protocol.__name__} describes its methods: {', '.join(required)}.",
        )

    return chosen


def methods(protocol: type) -> list[str]:
    """Return the names of a protocol's public methods and `__call__`, in the order of their definition."""
    return [
        name
        for name, value in vars(protocol).items()
        if callable(value) and (not name.startswith("_") or name == "__call__")
    ]


def locate(path: Any, *, key: str = "_target_") -> Callable[..., Any]:
    """Import a class or a function by its import path.

    Args:
        path: the import path, such as `package.module.Class`.
        key: the name of the setting, for errors.

    Returns:
        The class or the function.

    Raises:
        ConfigError: nothing callable has this import path, or its module can't be imported.

    Example:
        relu = locate("torch.nn.functional.relu")
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"{key} is {path!r}, which is not an import path.", hint="Write it as `package.module.ClassName`."
        )

    module, names = _import_longest(path, key)
    value: Any = module
    for name in names:
        if not hasattr(value, name):
            raise _no_attribute(path, value, name, key)
        value = getattr(value, name)

    if not callable(value):
        raise ConfigError(
            f"{key} is {path!r}, a {type(value).__name__} that can't be called.",
            hint="Give the import path of a class or a function.",
        )

    return value  # type: ignore[no-any-return]


def _import_longest(path: str, key: str) -> tuple[ModuleType, list[str]]:
    """Import the longest prefix of `path` that is a module.

    Returns:
        The module, and the remaining names: attributes that lead from the module to the class or function.

    Raises:
        ConfigError: a module does not exist, or its import fails.
    """
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
    """Return the error for an import path with a module that does not exist.

    Args:
        path: the import path.
        name: the dotted name of the missing module.
        parent: the package that should contain the module; None for a top-level module.
        key: the name of the setting, for the message.
    """
    if parent is None:
        reason = f"there is no module {name}"
        hint = src_layout_hint(name)
    else:
        last_name = name.rpartition(".")[2]
        reason = f"module {parent.__name__} has no {last_name}"
        hint = near_matches(last_name, _public(parent))

    return ConfigError(
        f"{key} is {path!r}, but {reason}.",
        hint=hint or "Modules are found beside your conf/ folder and in the installed packages.",
    )


def src_layout_hint(module: str, project_dir: Path | None = None) -> str:
    """Return advice for a missing module that is in `src/` of the project; empty if `src/` lacks it too.

    Args:
        module: the dotted name of the module.
        project_dir: the project folder; None: the current folder.
    """
    name = module.partition(".")[0]
    src = (project_dir or Path.cwd()) / "src"
    source = next((path for path in (src / name, src / f"{name}.py") if path.exists()), None)
    if source is None:
        return ""
    return (
        f"src/{source.name} is in this project, but src/ is not on the search path. "
        "Install the project where the job runs (`pip install -e .`), or set PYTHONPATH=src."
    )


def _broken_module(path: str, name: str, error: Exception, key: str) -> ConfigError:
    return ConfigError(
        f"{key} is {path!r}, but importing {name} failed: {type(error).__name__}: {error}.",
        hint=f"`python -c 'import {name}'` prints the whole error.",
    )


def _no_attribute(path: str, owner: Any, name: str, key: str) -> ConfigError:
    owner_name = getattr(owner, "__name__", type(owner).__name__)
    return ConfigError(
        f"{key} is {path!r}, but {owner_name} has no {name!r}.", hint=near_matches(name, _public(owner))
    )


def _public(owner: Any) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]
