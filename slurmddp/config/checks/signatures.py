"""Read the parameters of a class or function from its source file, without importing any code.

Arguments that the class or function does not take are refused before a job starts.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.settings.keys import TOP, keys
from slurmddp.settings.spec import SPECIAL_KEYS

_PASSED = {
    "optimizer": ("parameters",),
    "scheduler": ("optimizer",),
    "program": ("distributon", "config", "folder"),
}
"""The arguments that ranks pass by position, before the arguments of the configuration."""
_CALLED_WITH_BATCHES = ("loss", "metrics")
"""Groups whose functions are called with outputs and targets, besides the arguments of the configuration."""
_MAX_STEPS = 8
"""The largest number of imports and base classes to follow on the way to a signature."""
_DATACLASS = ("dataclass", "dataclasses.dataclass")
"""Spellings of the decorator of dataclasses, the only decorator whose effect on a signature is known."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a class or function that a call may pass by name, without `self`."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    """The names of the parameters without a default, in their order."""
    file: Path
    """The source file."""
    positions: float = math.inf
    """The largest number of arguments that a call may pass by position; None for no limit."""


@dataclass(frozen=True)
class _Place:
    """A module whose source is read: its name, its file, and the project's folder."""

    module: str
    file: Path
    project_dir: Path

    @property
    def package(self) -> str:
        """The package to which relative imports of the module refer."""
        return self.module if self.file.name == "__init__.py" else self.module.rpartition(".")[0]


def signature_of(target: str, project_dir: Path) -> Signature | None:
    """Return the signature of a class or function, read from its source without importing it.

    Imports inside of modules and base classes are followed, at most `_MAX_STEPS`.

    Args:
        target: the import path.
        project_dir: the project's folder.

    Returns:
        None if the source can't be read, or does not show the signature: `**kwargs` takes any name, and a
        decorator other than `dataclass`, a metaclass or `__new__` may change the parameters.
    """
    with suppress(OSError, SyntaxError, ValueError, ImportError):
        return _of_path(target, project_dir, _MAX_STEPS)
    return None


def check_arguments(key: str, node: Mapping[str, Any], project_dir: Path) -> None:
    """Raise ConfigError if the ranks can't call a class or function of the project with a node's arguments.

    Classes and functions outside of the project are not checked.

    Args:
        key: the full name of the node.
        node: a mapping with a `_target_` that exists.
        project_dir: the project's folder.

    Raises:
        ConfigError: an argument is unknown or missing, or there are too many by position.
    """
    target = str(node["_target_"])
    module, _ = find_module(target.split("."), project_dir)
    # The files of other packages are not parsed, which would take tens of milliseconds: they import nothing
    # from the project.
    if module is None or not Path(module.origin or "").is_relative_to(project_dir):
        return

    signature = signature_of(target, project_dir)
    if signature is None or not signature.file.is_relative_to(project_dir):
        return

    outer = TOP.get(key)
    section = keys(outer.sections[0]) if outer is not None and outer.is_open else {}
    given = [name for name in node if name not in SPECIAL_KEYS and name not in section]
    for name in given:
        if name not in signature.names:
            raise unknown_argument(f"{key}.{name}", target, signature, is_typed=False)

    group = key.partition(".")[0]
    if group in _CALLED_WITH_BATCHES or node.get("_partial_"):
        return

    passed = [*_PASSED.get(key, ()), *map(str, node.get("_args_") or ())]
    if len(passed) > signature.positions:
        raise ConfigError(
            f"`{key}._target_` is {target}, which takes {signature.positions} arguments by position, but is "
            f"called with {len(passed)}.",
            hint=f"The arguments by position are {', '.join(passed)}.",
        )

    by_position = signature.names[: len(passed)]
    missing = [name for name in signature.required if name not in (*given, *by_position)]
    if missing:
        raise ConfigError(
            f"`{key}._target_` is {target}, which needs {', '.join(missing)}.",
            hint=f"Use {key}.{missing[0]}=VALUE, or give the parameter a default.",
        )


def unknown_argument(key: str, target: str, signature: Signature, *, is_typed: bool) -> ConfigError:
    """Return the error for a key that names no parameter of a class or function.

    Args:
        key: the full name of the key.
        target: the import path of the class or function.
        signature: its signature.
        is_typed: whether the key was typed on the command line, and not written in a file.
    """
    node, _, name = key.rpartition(".")
    taken = ", ".join(signature.names) or "no arguments"
    hint = near_matches(name, signature.names, prefix=f"{node}.", else_all=False)
    if not hint and not is_typed:
        hint = f"Remove it from the file, or write '~{key}' on the command line."
    return ConfigError(
        f"`{key}` is given, but {target} takes no argument {name!r}. It takes {taken}.", hint=hint
    )


def find_module(names: Sequence[str], project_dir: Path) -> tuple[ModuleSpec | None, Sequence[str]]:
    """Find the longest beginning of a dotted path that is a module, without importing it.

    The project is searched before the installed packages.

    Args:
        names: the parts of the dotted path.
        project_dir: the project's folder.

    Returns:
        The module and the names that follow it; None instead of the module if even the first name is none.
    """
    top, *rest = names
    # Not looked up: `__main__` is slurmddp in this process, but another program in the ranks.
    if top == "__main__":
        return None, rest

    spec = PathFinder.find_spec(top, [str(project_dir)]) or importlib.util.find_spec(top)
    while rest and spec:
        inner = PathFinder.find_spec(rest[0], spec.submodule_search_locations or [])
        if inner is None:
            break
        spec = inner
        rest = rest[1:]

    return spec, rest


def _of_path(target: str, project_dir: Path, steps: int) -> Signature | None:
    """Return the signature of an import path; None if it takes more than `steps` imports and base classes."""
    names = target.split(".")
    spec, rest = find_module(names, project_dir)
    if spec is None or len(rest) != 1 or not str(spec.origin).endswith(".py"):
        return None

    module = ".".join(names[:-1])
    return _of_name(rest[0], _Place(module, Path(str(spec.origin)), project_dir), steps)


def _of_name(name: str, place: _Place, steps: int) -> Signature | None:
    """Return the signature of a name in a module.

    None unless exactly one statement of the module binds the name, and this is a function, class or import.
    """
    bindings = [node for node in _tree(place.file).body if name in _bound(node)]
    if len(bindings) != 1 or steps == 0:
        return None

    node = bindings[0]
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        return _of_arguments(node.args, place, skip=0)
    if isinstance(node, ast.ClassDef):
        return _of_class(node, place, steps - 1)
    if isinstance(node, ast.ImportFrom):
        (original,) = (alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return _of_path(f"{_source(node, place)}.{original}", place.project_dir, steps - 1)
    return None


def _source(node: ast.ImportFrom, place: _Place) -> str:
    """Return the absolute name of MODULE in a statement `from MODULE import ...`, which may be relative."""
    return importlib.util.resolve_name("." * node.level + (node.module or ""), place.package)


def _of_class(node: ast.ClassDef, place: _Place, steps: int) -> Signature | None:
    """Return the signature of a class, from its `__init__`, its dataclass fields, or its base class."""
    # `class A(metaclass=B)`: a metaclass may change the arguments of the call.
    if node.keywords:
        return None
    if node.decorator_list:
        names = {_name_of(decorator) for decorator in node.decorator_list}
        if node.bases or not names <= set(_DATACLASS):
            return None
        return _of_fields(node, place)

    methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
    if "__new__" in methods:
        return None
    if "__init__" in methods:
        method = methods["__init__"]
        return None if method.decorator_list else _of_arguments(method.args, place, skip=1)

    # The signature is unknown if `__init__` is assigned or defined under a condition, or if one of several
    # base classes has it.
    if any("__init__" in _bound(statement) for statement in node.body) or len(node.bases) > 1:
        return None
    if node.bases:
        return _of_base(node.bases[0], place, steps)
    return Signature((), (), place.file)


def _name_of(decorator: ast.expr) -> str:
    """Return the dotted name of a decorator, without its arguments."""
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _of_base(base: ast.expr, place: _Place, steps: int) -> Signature | None:
    """Return the signature of a base class, which the source names as `Base` or `module.Base`."""
    if isinstance(base, ast.Name):
        return _of_name(base.id, place, steps)

    names = ast.unparse(base).split(".")
    for node in _tree(place.file).body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == names[0]:
                prefix = f"{_source(node, place)}." if isinstance(node, ast.ImportFrom) else ""
                return _of_path(".".join([prefix + alias.name, *names[1:]]), place.project_dir, steps)

    return None


def _of_arguments(arguments: ast.arguments, place: _Place, *, skip: int) -> Signature | None:
    """Return the signature of a function without its first `skip` parameters, such as `self`.

    None if the function has `**kwargs` or positional-only parameters.
    """
    if arguments.kwarg is not None or arguments.posonlyargs:
        return None

    plain = [argument.arg for argument in arguments.args]
    required = plain[: len(plain) - len(arguments.defaults)]
    required_by_name = [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]

    names = [*plain[skip:], *(argument.arg for argument in arguments.kwonlyargs)]
    positions = len(plain) - skip if arguments.vararg is None else math.inf
    return Signature(tuple(names), (*required[skip:], *required_by_name), place.file, positions)


def _of_fields(node: ast.ClassDef, place: _Place) -> Signature | None:
    """Return the signature of a dataclass; None if it may have fields that are not plain parameters."""
    defaults: dict[str, ast.expr | None] = {}
    statements: list[ast.AST] = [*node.decorator_list]
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            defaults[statement.target.id] = statement.value
            statements.append(statement)

    text = "\n".join(map(ast.unparse, statements))
    if any(marker in text for marker in ("ClassVar", "InitVar", "KW_ONLY", "init=", "field(")):
        return None
    required = [name for name, default in defaults.items() if default is None]
    return Signature(tuple(defaults), tuple(required), place.file)


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines, imports or assigns, also inside of its blocks."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id
            elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                yield inner.name
            elif isinstance(inner, (ast.Import, ast.ImportFrom)):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in inner.names)


def _tree(file: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed again only after a change."""
    # The version is part of the cache's key, because in a notebook the file may change between two calls.
    version = file.stat()
    return _parsed(file, version.st_ino, version.st_mtime_ns, version.st_size)


@lru_cache(maxsize=64)
def _parsed(file: Path, *_version: int) -> ast.Module:
    """Return the syntax tree of a file; the cache holds it by path and version, for all points of a sweep."""
    return ast.parse(file.read_bytes())
