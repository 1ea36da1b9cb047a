"""Check names, folders, files and import paths of a configuration, without importing any code."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import pkgutil
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmddp.config.check_values import check_special_keys
from slurmddp.config.schema import OPEN_NODES
from slurmddp.errors import ConfigError, near_matches
from slurmddp.spec import MODULE, is_own_trainer

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_CLOCK_WITHOUT_QUOTES = re.compile(r"^\s*time_limit:\s*([0-9]+(?::[0-9]+)+)\s*(?:#.*)?$", re.MULTILINE)
_ON_THE_NODES = ("torch",)
"""Packages that only the nodes need; a login node may lack them."""
_PATH_KEYS = ("path", "root")


def check_name(name: str) -> None:
    """Refuse a run name that is not valid for both a folder and a SLURM job."""
    if _NAME.fullmatch(name):
        return
    plain = as_name(name)
    hint = f"For example name={plain}." if plain else "For example name=first."
    raise ConfigError(
        f"`name` is {name[:120]!r}; it becomes a folder and a SLURM job name, so it may hold only letters, "
        "digits, '.', '_' and '-', must begin with a letter, a digit or '_', and has at most 100 of them.",
        hint=hint,
    )


def as_name(text: str) -> str:
    """Return `text` with dashes in place of characters that a run name can't hold; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100]


def check_folder(run_dir: Path) -> None:
    """Refuse a run folder with a control character in its path, because a script can't hold it."""
    if any(ord(character) < 32 for character in str(run_dir)):
        raise ConfigError(
            f"The run folder would be {str(run_dir)!r}, which holds a line break or a control character.",
            hint="Rename the folder, or say runs_dir=/another/folder.",
        )


def check_project(project_dir: Path) -> None:
    """Refuse a project folder whose path Hydra would read as a reference to another value."""
    if "${" in str(project_dir):
        raise ConfigError(
            f"The path {project_dir} holds '${{', which Hydra reads.", hint="Rename the folder."
        )


def check_clocks(files: Mapping[str, Path]) -> None:
    """Refuse `time_limit: 24:00:00` without quotes, because YAML reads it as the number 86400."""
    for path in files.values():
        match = _CLOCK_WITHOUT_QUOTES.search(path.read_text(encoding="utf-8", errors="replace"))
        if match:
            raise ConfigError(
                f"{path} says `time_limit: {match[1]}` without quotes, which YAML can read as one number.",
                hint=f'Write time_limit: "{match[1]}".',
            )


def check_data(config: Mapping[str, Any], project_dir: Path) -> None:
    """Refuse a data set whose `path` or `root` does not exist, before a job waits in the queue for it."""
    for key, value, node in _entries(config.get("data"), "data"):
        if key.rpartition(".")[2] in _PATH_KEYS and isinstance(value, str) and not node.get("download"):
            path = project_dir / Path(value).expanduser()
            if not path.exists():
                raise ConfigError(f"There is no data at {path} (`{key}`).", hint=_near_path(path))


def check_script(config: Mapping[str, Any], project_dir: Path, *, here: bool = True) -> None:
    """Refuse a `program.script` that does not exist, and arguments without a script.

    Args:
        here: whether this Python is the interpreter of the ranks, so that a missing module is an error.
    """
    script = config["program"].get("script")
    if script is None and config["program"].get("args") and is_own_trainer(config["program"]):
        raise ConfigError(
            "`program.args` holds the arguments of a script, and there is no script.",
            hint="Say slurmddp run FILE.py, with its arguments after it.",
        )
    if config["program"].get("checkpoints") is not None and is_own_trainer(config["program"]):
        raise ConfigError(
            "`program.checkpoints` is for a program of your own: the trainer saves in the run folder.",
            hint="Leave it out, or run a script: slurmddp run FILE.py.",
        )
    if script is not None and script.startswith(MODULE):
        return _check_module(script.removeprefix(MODULE).strip(), project_dir, here=here)
    if script is not None and not (path := project_dir / Path(script).expanduser()).is_file():
        raise ConfigError(f"There is no script {path} (`program.script`).", hint=_near_path(path))


def _check_module(name: str, project_dir: Path, *, here: bool) -> None:
    if not _MODULE.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not the name of a module.", hint="Write package.module, as after `python -m`."
        )
    top, *rest = name.split(".")
    spec = _find_top(f"-m {name} was given", top, project_dir, here=here)
    if spec is None or not spec.submodule_search_locations:
        return
    folder = Path(next(iter(spec.submodule_search_locations)))
    for part in [*rest, "__main__"]:
        if (folder / f"{part}.py").is_file() or not folder.is_relative_to(project_dir):
            return
        if not (folder / part).is_dir():
            near = near_matches(part, _modules_in(folder)) or "The folder holds no modules."
            raise ConfigError(f"There is no module {name} to run: {folder} has no {part}.py.", hint=near)
        folder /= part


def check_loss(config: Mapping[str, Any]) -> None:
    """Refuse a training without a loss function; other programs may have none."""
    if config["loss"] is None and is_own_trainer(config["program"]):
        raise ConfigError(
            "`loss` is empty, but the trainer needs a loss function.",
            hint="Say loss=NAME for a file of conf/loss, or loss._target_=package.module.function.",
        )


def check_targets(config: Mapping[str, Any], project_dir: Path, *, here: bool = True) -> None:
    """Refuse a `_target_` that can't be imported.

    Args:
        here: whether this interpreter runs the ranks. Packages of another interpreter can't be seen here.
    """
    for node in OPEN_NODES:
        value = config.get(node)
        if value is None:
            continue
        if "_target_" not in value:
            raise ConfigError(
                f"`{node}` has no `_target_`, the import path of a class or function.",
                hint=f"Say {node}._target_=package.module.Name.",
            )
        for key, inner, _ in [(node, value, {}), *_entries(value, node)]:
            if key.rpartition(".")[2] == "_target_":
                check_target(key, inner, project_dir, here=here)
            elif isinstance(inner, Mapping) and "_target_" in inner:
                check_special_keys(key, inner)


def check_target(key: str, target: Any, project_dir: Path, *, here: bool = True) -> None:
    """Refuse an import path that is misspelled or whose package does not exist; imports nothing."""
    if not isinstance(target, str) or not _IMPORT_PATH.fullmatch(target):
        raise ConfigError(
            f"`{key}` is {target!r}, which is not an import path.",
            hint="Write package.module.Name, such as torch.optim.AdamW.",
        )
    top, *rest = target.split(".")
    if top in _ON_THE_NODES:
        return
    if (spec := _find_top(f"`{key}` is {target}", top, project_dir, here=here)) is not None:
        _check_inside(key, target, spec, rest, project_dir)


def _find_top(
    given: str, top: str, project_dir: Path, *, here: bool
) -> importlib.machinery.ModuleSpec | None:
    """Return where a top-level module is found, and None for another interpreter's; raises ConfigError."""
    spec = _find(top, project_dir)
    if spec is None and here:
        near = near_matches(top, [*_modules_in(project_dir), *_installed()], else_all=False)
        raise ConfigError(
            f"{given}, but there is no module {top!r} in {project_dir} or in this Python.",
            hint=f"{near} Write {top}.py there, or install the package.".strip(),
        )
    return spec


def _find(top: str, project_dir: Path) -> importlib.machinery.ModuleSpec | None:
    spec = importlib.machinery.PathFinder.find_spec(top, [str(project_dir)])
    if top == "__main__":  # Here it is this command; in the ranks it is another program.
        return None
    return spec or importlib.util.find_spec(top)


def _check_inside(
    key: str, target: str, spec: importlib.machinery.ModuleSpec, rest: list[str], project_dir: Path
) -> None:
    """Search the name in the project's source. Names in other packages are checked by their import."""
    file = _source(spec, rest)
    if file is None or not file.is_relative_to(project_dir):
        return
    names = _names_in(file)
    if names is not None and rest and rest[0] not in names:
        raise ConfigError(
            f"`{key}` is {target}, but {file} defines no {rest[0]!r}.",
            hint=near_matches(rest[0], names) or "The file defines nothing.",
        )


def _source(spec: importlib.machinery.ModuleSpec, rest: list[str]) -> Path | None:
    """Return the file that should define the next name; removes the modules on the way from `rest`."""
    folders = list(spec.submodule_search_locations or [])
    file = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    while folders and rest:
        inner, module = Path(folders[0]) / rest[0], Path(folders[0]) / f"{rest[0]}.py"
        if inner.is_dir():
            rest.pop(0)
            folders, file = [str(inner)], inner / "__init__.py"
        elif module.is_file():
            rest.pop(0)
            return module
        else:
            break
    return file if file is not None and file.is_file() else None


def _names_in(file: Path) -> set[str] | None:
    """Return the names that a module binds; None if only running it can tell."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{file}, line {line}" if line else str(file)
        raise ConfigError(f"{where} is not valid Python: {error}.", hint="Correct it first.") from error
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
    """Return the modules and packages of a folder of the project; a package needs no `__init__.py`."""
    return [
        *(file.stem for file in folder.glob("*.py")),
        *(file.parent.name for file in folder.glob("*/*.py")),
    ]


def _installed() -> list[str]:
    return [module.name for module in pkgutil.iter_modules()]


def _entries(node: Any, key: str) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield every value below `node` with its full key and the mapping that holds it."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield f"{key}.{name}", value, node
            yield from _entries(value, f"{key}.{name}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _entries(value, f"{key}[{number}]")


def _near_path(path: Path) -> str:
    """Return a hint with the first part of a path that does not exist, and the names nearest to it."""
    parent = next((folder for folder in path.parents if folder.exists()), Path("/"))
    wanted = path.relative_to(parent).parts[0]
    near = ""
    with suppress(OSError):
        near = near_matches(wanted, [entry.name for entry in parent.iterdir()], else_all=False)
    found = f"{parent} exists, {wanted!r} in it does not."
    return " ".join(filter(None, [found, near, "Give a path that this machine can see."]))
