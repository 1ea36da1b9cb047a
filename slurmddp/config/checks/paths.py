"""Check names, folders, files and import paths of a configuration, without importing any code."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from slurmddp.config.checks.signatures import check_arguments, find_module
from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.plugins import src_layout_hint
from slurmddp.settings.check_values import check_special_keys
from slurmddp.settings.keys import NAMED_NODES, OPEN_NODES, TOP
from slurmddp.settings.loggers import targets
from slurmddp.settings.removed import removed_torchrun
from slurmddp.settings.spec import CONTROLLER, MODULE, is_command, is_own_trainer, own_script

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_ON_THE_NODES = ("torch",)
"""Packages that only the nodes need; they may be missing on a login node."""
_PATH_KEYS = ("path", "root")
"""Arguments of a data set that hold the path of its files."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_PLACES = ("run_dir", "attempt")
"""Names of the placeholders, such as `{run_dir}`, that are replaced in the arguments of a script."""


def check_name(name: str) -> None:
    """Raise ConfigError unless a name is valid for a folder and for a SLURM job."""
    if _NAME.fullmatch(name):
        return
    plain = as_name(name)
    hint = f"For example name={plain}." if plain else "For example name=first."
    raise ConfigError(
        f"`name` is {name[:120]!r}. It becomes the name of a folder and a SLURM job, so it may hold at most "
        "100 letters, digits, '.', '_' and '-', and must begin with a letter, a digit or '_'.",
        hint=hint,
    )


def as_name(text: str) -> str:
    """Return a text as a run name, with a dash for forbidden characters; empty if it has only these."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100]


def check_folder(run_dir: Path) -> None:
    """Raise ConfigError for a run folder with a control character in its path.

    No batch script can hold such a path.
    """
    if any(ord(character) < 32 for character in str(run_dir)):
        raise ConfigError(
            f"The run folder would be {str(run_dir)!r}, which holds a line break or a control character.",
            hint="Rename the folder, or use runs_dir=/another/folder.",
        )


def check_utf8(what: str, text: str) -> None:
    """Raise ConfigError for a text that is not UTF-8, because no file of the run could hold it.

    Args:
        what: the kind of text, as the beginning of the message.
        text: the text.
    """
    # Python decodes an argument or path with other bytes to surrogates, U+D800 to U+DFFF.
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise ConfigError(f"{what} {text[:120]!r} is not UTF-8.", hint="Write or rename it in UTF-8.")


def check_project(project_dir: Path) -> None:
    """Raise ConfigError for a project folder in which a run can't work.

    Its path is not UTF-8 or holds `${`, or a file in it, such as slurmddp.py, hides the package slurmddp.
    """
    check_utf8("The path", str(project_dir))
    if "${" in str(project_dir):
        raise ConfigError(
            f"The path {project_dir} holds '${{', which Hydra reads as a reference.",
            hint="Rename the folder.",
        )

    package, missing = find_module(("slurmddp", "launchers"), project_dir)
    if missing and package is not None and package.origin:
        raise ConfigError(
            f"{package.origin} hides the package slurmddp, which the ranks import by that name.",
            hint="Rename the file.",
        )


def check_python(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if `cluster.python` is a command with arguments.

    A path with blanks is accepted if it exists, or if its first word is no command.
    """
    python = (config["cluster"] or {}).get("python") or ""
    first, _, arguments = python.partition(" ")
    if arguments and shutil.which(first) and not Path(python).exists():
        raise ConfigError(
            f"`cluster.python` is {python!r}, a command with arguments, but must be the path of a program.",
            hint="Write an executable script of two lines, `#!/bin/sh` and "
            f'`exec {python} "$@"`, and give the path of the script.',
        )


def check_data(config: Mapping[str, Any], project_dir: Path) -> None:
    """Raise ConfigError if the `path` or `root` of a data set does not exist.

    Otherwise the job would fail only after it has waited in the queue. Data sets with `download` are not
    checked.
    """
    for key, value, node in _entries(config.get("data"), "data"):
        is_path = key.rpartition(".")[2] in _PATH_KEYS and isinstance(value, str)
        if not is_path or node.get("download"):
            continue
        # slurmddp's data sets read only files, but the user's class may read an address such as s3://.
        if "://" in value and not str(node.get("_target_")).startswith("slurmddp."):
            continue

        path = project_dir / Path(value).expanduser()
        if not path.exists():
            raise ConfigError(f"There is no data at {path} (`{key}`).", hint=_near_path(path))


def check_program(config: Mapping[str, Any], project_dir: Path, *, same_python: bool) -> None:
    """Raise ConfigError for a program that does not exist, or keys of `program` that it does not use.

    Args:
        config: a configuration with typed values.
        project_dir: the project's folder.
        same_python: whether this interpreter also runs the ranks. Otherwise the packages of the ranks are
            unknown and not checked.
    """
    program = config["program"]
    if "torchrun" in program:
        raise removed_torchrun()
    if is_own_trainer(program):
        _check_trainer(config)
        return

    _check_placeholders(program)
    script = own_script(program)
    if is_command(script) and program["script"] != CONTROLLER:
        _check_command(script, project_dir, is_local=config["cluster"] is None)
    elif script:
        check_script(script, project_dir, same_python=same_python)


def check_script(script: str, project_dir: Path, *, same_python: bool) -> None:
    """Raise ConfigError for a Python script or `-m MODULE` that does not exist.

    Args:
        script: the value of `program.script`.
        project_dir: the project's folder.
        same_python: whether this interpreter also runs the ranks; only then modules are looked up.
    """
    if script.startswith(MODULE):
        _check_module(script.removeprefix(MODULE).strip(), project_dir, same_python=same_python)
        return

    path = project_dir / Path(script).expanduser()
    if not path.is_file():
        raise ConfigError(f"There is no script {path} (`program.script`).", hint=_near_path(path))


def _check_placeholders(program: Mapping[str, Any]) -> None:
    """Raise ConfigError for a misspelled `{run_dir}` or `{attempt}`, which nothing would replace."""
    for name in _PLACEHOLDER.findall(str(program.get("checkpoints") or "")):
        if name != "run_dir":
            raise ConfigError(
                f"`program.checkpoints` holds {{{name}}}, but only {{run_dir}} has a meaning in this key.",
                hint="Write {run_dir} for the run folder, and * for a part of the name that changes.",
            )

    for name in _PLACEHOLDER.findall(str(program.get("resume_args") or "")):
        near = get_close_matches(name, _PLACES)
        if near and name not in _PLACES:
            raise ConfigError(
                f"`program.resume_args` holds {{{name}}}, which has no meaning in this key.",
                hint=f"Did you mean {{{near[0]}}}?",
            )


def _check_command(command: str, project_dir: Path, *, is_local: bool) -> None:
    """Raise ConfigError for a command that can't be started.

    A command without a slash is looked up in PATH only for a local run: on a cluster, the `setup` lines may
    change PATH.
    """
    path = project_dir / command
    if "/" not in command:
        if is_local and shutil.which(command) is None:
            raise ConfigError(
                f"There is no command {command!r} on PATH.",
                hint=f"A Python script ends in .py.{_in_the_project(command, path)}",
            )
    elif not path.is_file():
        raise ConfigError(f"There is no program {path} (`program.script`).", hint=_near_path(path))
    elif not os.access(path, os.X_OK):
        raise ConfigError(
            f"{path} is not executable (`program.script`).", hint=f"Make it executable: chmod +x {command}"
        )


def _in_the_project(command: str, path: Path) -> str:
    """Return advice on starting the project's file or folder that has the name of a command.

    Empty if the project has neither such a file nor such a folder.
    """
    if path.is_file():
        return f" For the file in this folder, write ./{command} or python {command}."
    if (path / "__main__.py").is_file():
        return f" For the __main__.py in this folder, write python {command}."
    return f" {path} is a folder." if path.is_dir() else ""


def _check_trainer(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if `program.args` or `program.checkpoints` is set for slurmddp's trainer."""
    if config["program"].get("args"):
        raise ConfigError(
            "`program.args` holds the arguments of a script, but no script is given.",
            hint="To run a script: slurmddp run FILE.py, with the script's arguments after it.",
        )
    if config["program"].get("checkpoints") is not None:
        raise ConfigError(
            "`program.checkpoints` is set, but slurmddp's trainer saves in the run folder.",
            hint="Omit it, or run a script of your own: slurmddp run FILE.py.",
        )


def _check_module(name: str, project_dir: Path, *, same_python: bool) -> None:
    """Raise ConfigError for a module of `python -m` that does not exist."""
    if not _MODULE.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not the name of a module.",
            hint="Write package.module, as after `python -m`. A sweep is `slurmddp run --multirun`.",
        )

    # If the name is a package, `python -m` runs its module `__main__`, which must exist, too.
    names = [*name.split("."), "__main__"]
    spec, missing = _locate(f"-m {name} was given", names, project_dir, same_python=same_python)
    folder = Path(next(iter((spec and spec.submodule_search_locations) or ()), ""))
    if missing and folder.is_relative_to(project_dir):
        near = near_matches(missing[0], _modules_in(folder)) or "The folder holds no modules."
        raise ConfigError(f"There is no module {name} to run: {folder} has no {missing[0]}.py.", hint=near)


def check_targets(config: Mapping[str, Any], project_dir: Path, *, same_python: bool) -> None:
    """Raise ConfigError for import paths in `backend` or `_target_` that don't exist, and wrong arguments.

    Args:
        config: a checked configuration.
        project_dir: the project's folder.
        same_python: whether this interpreter also runs the ranks; only then modules are looked up.
    """
    # The key is one name, or one name for each type of device: cpu:gloo,cuda:package.Class.
    for part in config["backend"].split(","):
        name = part.rpartition(":")[2].strip()
        if "." in name:
            _check_target("backend", name, project_dir, same_python=same_python)

    for key, node in _nodes_of(config):
        if node is not None:
            _check_node(key, node, project_dir, same_python=same_python)


def _nodes_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, node) for each key whose value, the node, describes an object to build, or is None."""
    for key in OPEN_NODES:
        if not _is_shipped_section(key, config.get(key)):
            yield key, config.get(key)
    for outer in NAMED_NODES:
        for name, node in (config[outer] or {}).items():
            yield f"{outer}.{name}", node


def _check_node(key: str, node: Mapping[str, Any], project_dir: Path, *, same_python: bool) -> None:
    """Raise ConfigError for a node without `_target_`, or with a wrong import path or argument.

    Nodes inside of the node are checked, too.
    """
    if "_target_" not in node:
        raise ConfigError(
            f"`{key}` has no `_target_`, the import path of a class or function.",
            hint=f"Use {key}._target_=package.module.Name.",
        )

    for inner_key, value, _ in [(key, node, {}), *_entries(node, key)]:
        if inner_key.rpartition(".")[2] == "_target_":
            _check_target(inner_key, value, project_dir, same_python=same_python)
        elif isinstance(value, Mapping) and "_target_" in value:
            check_special_keys(inner_key, value)
            if inner_key == key or _builds_inner_nodes(node):
                check_arguments(inner_key, value, project_dir)


def _builds_inner_nodes(value: Any) -> bool:
    """Return whether ranks also build objects from the nodes inside of a node.

    If the node contains `_recursive_: false`, at any depth, ranks pass the inner nodes on as plain mappings.
    """
    flags = [inner for key, inner, _ in _entries(value, "") if key.rpartition(".")[2] == "_recursive_"]
    return False not in flags


def _is_shipped_section(node: str, value: Any) -> bool:
    """Return whether the value of a group is a section of the schema, not a node with `_target_`.

    Its keys and values are already checked against the schema.
    """
    return TOP[node].is_group and bool(TOP[node].sections) and value is not None and "_target_" not in value


def check_loggers(loggers: Any, project_dir: Path, *, same_python: bool) -> None:
    """Raise ConfigError for a logger that is unknown, can't be imported or has wrong arguments.

    Args:
        loggers: the value of the key `loggers`.
        project_dir: the project's folder.
        same_python: whether this interpreter also runs the ranks; only then modules are looked up.
    """
    for key, node in targets(loggers, same_python=same_python).items():
        _check_target(f"{key}._target_", node["_target_"], project_dir, same_python=same_python)
        check_special_keys(key, node)
        check_arguments(key, node, project_dir)


def _check_target(key: str, target: Any, project_dir: Path, *, same_python: bool) -> None:
    """Raise ConfigError for an import path that does not exist, without importing it.

    For a package outside of the project, only the package is looked up, not the name in it.
    """
    if not isinstance(target, str) or not _IMPORT_PATH.fullmatch(target):
        raise ConfigError(
            f"`{key}` is {target!r}, which is not an import path.",
            hint="Write package.module.Name, such as torch.optim.AdamW.",
        )

    names = target.split(".")
    if names[0] in _ON_THE_NODES:
        return

    spec, rest = _locate(f"`{key}` is {target}", names, project_dir, same_python=same_python)
    file = Path((spec and spec.origin) or "")
    if not rest or file.suffix != ".py" or not file.is_relative_to(project_dir):
        return

    defined = _names_in(file)
    if defined is not None and rest[0] not in defined:
        raise ConfigError(
            f"`{key}` is {target}, but {file} defines no {rest[0]!r}.",
            hint=near_matches(rest[0], defined) or "The file defines nothing.",
        )


def _locate(
    given: str, names: Sequence[str], project_dir: Path, *, same_python: bool
) -> tuple[ModuleSpec | None, Sequence[str]]:
    """Find the longest beginning of a dotted path that is a module, without importing it.

    The project is searched before the installed packages.

    Args:
        given: the beginning of the error message, such as "`data._target_` is a.b.C".
        names: the parts of the dotted path.
        project_dir: the project's folder.
        same_python: whether this interpreter also runs the ranks; only then modules are looked up.

    Returns:
        The module and the names that follow it. None instead of the module if it is not found, but the ranks
        run in another Python, which may have it.

    Raises:
        ConfigError: the module is not found, and the ranks run in this Python.
    """
    top = names[0]
    spec, rest = find_module(names, project_dir)
    if spec is None and same_python:
        installed = [module.name for module in pkgutil.iter_modules()]
        near = near_matches(top, [*_modules_in(project_dir), *installed], else_all=False)
        hint = f"{near} Write {top}.py in this folder, or install the package.".strip()
        raise ConfigError(
            f"{given}, but there is no module {top!r} in {project_dir} or in this Python.",
            hint=src_layout_hint(top, project_dir) or hint,
        )
    return spec, rest


def _names_in(file: Path) -> set[str] | None:
    """Return the names that the source of a module defines.

    None if the source has `import *` or `__getattr__`, so that the names are known only when the module runs.

    Raises:
        ConfigError: the file is not valid Python.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"{file}, line {line}" if line else str(file)
        raise ConfigError(f"{place} is not valid Python: {error}.", hint="Correct the file.") from error

    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return None if names & {"*", "__getattr__"} else names


def _modules_in(folder: Path) -> list[str]:
    """Return the names of modules and packages in a folder; a folder with a Python file is a package."""
    return [
        *(file.stem for file in folder.glob("*.py") if not file.stem.startswith("__")),
        *(file.parent.name for file in folder.glob("*/*.py")),
    ]


def _entries(node: Any, key: str) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield (full key, value, mapping that holds the key) for every value in nested mappings and lists."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield f"{key}.{name}", value, node
            yield from _entries(value, f"{key}.{name}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _entries(value, f"{key}[{number}]")


def _near_path(path: Path) -> str:
    """Return a hint for a path that is not a file: the first part that is missing, and similar names."""
    if path.is_dir():
        return f"{path} is a folder: give the path of a file in it."

    parent = next((folder for folder in path.parents if folder.exists()), Path("/"))
    missing = path.relative_to(parent).parts[0]
    near = ""
    with suppress(OSError):
        near = near_matches(missing, [entry.name for entry in parent.iterdir()], else_all=False)

    sentences = [f"{parent} exists, but {missing!r} in it does not.", near]
    return " ".join(filter(None, [*sentences, "Give a path that exists on this machine."]))
