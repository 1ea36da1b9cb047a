"""Find the files of a configuration: in the project, in folders of the search path, and in slurmddp."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import slurmddp
from slurmddp.config.composition import hydra_keys
from slurmddp.errors import ConfigError, SlurmddpError
from slurmddp.near_matches import near_matches

_CODE = "slurmddp_project_config"
"""Name under which the Python file beside the project's defaults is imported."""


@dataclass(frozen=True)
class Sources:
    """The flags that name the folders and the file of a project's configuration; Hydra has the same flags."""

    path: str = "conf"
    """--config-path: the folder with the project's groups and defaults."""
    name: str = "slurmddp"
    """--config-name: the file in `path` with the project's defaults."""
    folders: tuple[str, ...] = ()
    """--config-dir: extra folders with groups."""

    @property
    def file(self) -> str:
        """The path of the project's defaults, relative to the project's folder."""
        return f"{self.path}/{self.name.removesuffix('.yaml')}.yaml"


DEFAULT = Sources()
"""The sources of a command without these flags."""


def conf_roots(project_dir: Path, sources: Sources = DEFAULT, searched: Sequence[str] = ()) -> list[Path]:
    """Return the folders with groups: the project's first, slurmddp's last.

    Args:
        project_dir: the project's folder.
        sources: the folders that the flags name.
        searched: the entries of `hydra.searchpath`.

    Returns:
        The project's conf/ if it exists, the folders of --config-dir and the search path, and slurmddp's.

    Raises:
        ConfigError: a folder of a flag or of the search path does not exist.
    """
    package_conf = Path(slurmddp.__file__).parent / "conf"
    project_conf = project_dir / sources.path
    if not project_conf.is_dir() and sources.path != DEFAULT.path:
        raise ConfigError(f"There is no folder {project_conf} (--config-path).")

    roots = [*hydra_keys.folders([*sources.folders, *searched], project_dir), package_conf]
    # If the project is slurmddp itself, its folder is already in the list.
    if project_conf.is_dir() and project_conf.resolve() != package_conf.resolve():
        roots.insert(0, project_conf)
    return roots


def defaults_file(project_dir: Path, sources: Sources) -> Path | None:
    """Return the file of the project's defaults; None if the project has no such file.

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
    """Run the Python file beside the file of the project's defaults, if there is one.

    The file may register resolvers and structured configs.
    """
    file = (project_dir / sources.file).with_suffix(".py")
    if file.is_file():
        _run(file, project_dir)


@functools.cache
def _run(file: Path, project_dir: Path) -> None:
    """Run a Python file in this process; a second call for the same file does nothing."""
    spec = importlib.util.spec_from_file_location(_CODE, file)
    if spec is None or spec.loader is None:
        return

    module = importlib.util.module_from_spec(spec)
    # Entered into `sys.modules`, because the decorator of a dataclass looks up its module there.
    sys.modules[_CODE] = module
    with hydra_keys.importable(project_dir):
        try:
            spec.loader.exec_module(module)
        except SlurmddpError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{file} can't be run: {type(error).__name__}: {error}.",
                hint="Correct it; it runs before the configuration is composed, to register resolvers and "
                "structured configs.",
            ) from error
