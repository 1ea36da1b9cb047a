"""Find the files of a configuration: the project's, other folders of groups, and slurmddp's own."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import slurmddp
from slurmddp.config.composition import hydra_keys
from slurmddp.errors import ConfigError, SlurmddpError, near_matches

_CODE = "slurmddp_project_config"
"""Name of the module that a project's code becomes."""


@dataclass(frozen=True)
class Sources:
    """The flags that say where a project's configuration lies, with the names that Hydra gives them."""

    path: str = "conf"
    """--config-path: the folder of the project's groups and defaults."""
    name: str = "slurmddp"
    """--config-name: the file in `path` with the project's defaults."""
    folders: tuple[str, ...] = ()
    """--config-dir: further folders of groups."""

    @property
    def file(self) -> str:
        """The file of the project's defaults, for messages."""
        return f"{self.path}/{self.name.removesuffix('.yaml')}.yaml"


DEFAULT = Sources()


def conf_roots(project_dir: Path, sources: Sources = DEFAULT, searched: Sequence[str] = ()) -> list[Path]:
    """Return the folders with configuration groups, the project's first, slurmddp's last.

    Args:
        project_dir: the folder of the command.
        sources: the flags.
        searched: the entries of `hydra.searchpath`.

    Raises:
        ConfigError: a folder that was named does not exist.
    """
    package, own = Path(slurmddp.__file__).parent / "conf", project_dir / sources.path
    if not own.is_dir() and sources.path != DEFAULT.path:
        raise ConfigError(f"There is no folder {own} (--config-path).")
    more = hydra_keys.folders([*sources.folders, *searched], project_dir)
    first = [own] if own.is_dir() and own.resolve() != package.resolve() else []
    return [*first, *more, package]


def defaults_file(project_dir: Path, sources: Sources) -> Path | None:
    """Return the file of the project's defaults; None if the project has no conf/slurmddp.yaml.

    Raises:
        ConfigError: the file that --config-name names does not exist.
    """
    file = project_dir / sources.file
    if file.is_file():
        return file
    if sources.name == DEFAULT.name:
        return None
    names = [path.stem for path in file.parent.glob("*.yaml")]
    raise ConfigError(f"There is no file {file} (--config-name).", hint=near_matches(file.stem, names))


def run_code(project_dir: Path, sources: Sources) -> None:
    """Run the Python file beside the project's defaults, which registers resolvers and structured configs."""
    file = (project_dir / sources.file).with_suffix(".py")
    if file.is_file():
        _run(file, project_dir)


@functools.cache
def _run(file: Path, project_dir: Path) -> None:
    spec = importlib.util.spec_from_file_location(_CODE, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[_CODE] = module  # Dataclasses look their module up.
    with hydra_keys.importable(project_dir):
        try:
            spec.loader.exec_module(module)
        except SlurmddpError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{file} can't be run: {type(error).__name__}: {error}.",
                hint="It registers resolvers and structured configs before the configuration is composed.",
            ) from error
