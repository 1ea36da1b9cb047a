"""Read Hydra's search path, and refuse every other key of Hydra with a hint at the key that replaces it.

Hydra would use these keys to run a program. In slurmddp, a run has its own run folder, logs and job.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmddp.errors import ConfigError

SEARCH_PATH = "hydra.searchpath"
_INSTEAD = {
    "hydra.run": "Use runs_dir=FOLDER and name=NAME. The name of a run folder ends in a hash of the run.",
    "hydra.sweep": "Use runs_dir=FOLDER and name=NAME. Each point of a sweep has a run folder there.",
    "hydra.sweeper": "`-m` sweeps with Hydra's basic sweeper, and `-m hydra/sweeper=optuna` searches "
    "(docs/guides/hydra.md); other sweepers are not supported.",
    "hydra.launcher": "+cluster=NAME submits. An application with @hydra.main takes hydra/launcher=slurmddp.",
    "hydra.mode": "`-m` sweeps; without it one command is one run.",
    "hydra.output_subdir": "The run folder holds the configuration in config.yaml and overrides.txt.",
    "hydra.job.name": "Use name=NAME.",
    "hydra.job.chdir": "Ranks start in the project's folder. A script gets its run folder as {run_dir}.",
    "hydra.job.env_set": "Use +cluster.env.NAME=VALUE; a local run inherits the environment.",
    "hydra.job.env_copy": "Use +cluster.env.NAME=VALUE; a local run inherits the environment.",
    "hydra.job_logging": "Each rank has a log in the run folder; `slurmddp logs RUN` prints them.",
    "hydra.hydra_logging": "`slurmddp --debug` prints the traceback of an error.",
    "hydra.verbose": "`slurmddp --debug` prints the traceback of an error.",
    "hydra.callbacks": "Use callbacks.NAME._target_=package.Class; the trainer calls its objects.",
}
"""Hints for refused keys of Hydra, by the beginning of the key: the setting or command to use instead."""


def is_hydras(key: str) -> bool:
    """Return whether a key or group belongs to Hydra itself."""
    return key.partition(".")[0].partition("/")[0] == "hydra"


def refusal(text: str, key: str) -> ConfigError:
    """Return the error for a key of Hydra that slurmddp does not read.

    Args:
        text: the setting as it was typed or written in a file.
        key: the key or group of the setting, such as `hydra.run.dir` or `hydra/launcher`.
    """
    dotted = key.replace("/", ".")
    hint = "Omit it; docs/guides/hydra.md lists Hydra's keys."
    for known, instead in _INSTEAD.items():
        if f"{dotted}.".startswith(f"{known}."):
            hint = instead
            break

    return ConfigError(
        f"{text!r} is a setting of Hydra itself, which slurmddp uses only to compose configurations.",
        hint=hint,
    )


def search_path(section: Any, place: str) -> list[str]:
    """Return the entries of `hydra.searchpath` in the `hydra` section of a file.

    Args:
        section: the section.
        place: the name of the file, for messages.

    Raises:
        ConfigError: the section has another key, or the search path is not a list of texts.
    """
    if not isinstance(section, Mapping):
        raise refusal(f"hydra: {section} in {place}", "hydra")

    for key, value in section.items():
        if key != "searchpath":
            name = f"hydra.{key}"
            if isinstance(value, Mapping) and value:
                name = f"hydra.{key}.{next(iter(value))}"
            raise refusal(f"{name} in {place}", name)
    return texts(section.get("searchpath"), place)


def texts(value: Any, place: str) -> list[str]:
    """Return the value of `hydra.searchpath`; raise ConfigError if it is not a list of texts."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ConfigError(
            f"`{SEARCH_PATH}` in {place} is {value!r}, not a list of folders.",
            hint=f"For example {SEARCH_PATH}=[file://shared/conf,pkg://my_package.conf].",
        )
    return value


def folders(entries: Sequence[str], project_dir: Path) -> list[Path]:
    """Return the folder of each entry of a search path.

    Args:
        entries: `file://FOLDER`, `pkg://package.module`, or the path of a folder.
        project_dir: the folder in which relative paths start.

    Raises:
        ConfigError: an entry has another form, or its folder or package does not exist.
    """
    found_folders = []
    for entry in entries:
        scheme, _, rest = entry.rpartition("://")
        if scheme not in ("", "file", "pkg"):
            raise ConfigError(
                f"The search path holds {entry!r}, which is neither a folder nor a package.",
                hint="Write file://FOLDER or pkg://PACKAGE.",
            )

        if scheme == "pkg":
            folder = _package_folder(rest, project_dir)
            name = f"package {rest}"
        else:
            folder = project_dir / Path(rest).expanduser()
            name = f"folder {folder}"

        if folder is None or not folder.is_dir():
            raise ConfigError(
                f"The search path holds {entry!r}, but there is no {name}.",
                hint=f"Relative paths start in {project_dir}.",
            )
        found_folders.append(folder)

    return found_folders


def _package_folder(name: str, project_dir: Path) -> Path | None:
    """Return the folder of a package, without importing the package; None if there is no such package."""
    with importable(project_dir):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None

    locations = list((spec and spec.submodule_search_locations) or ())
    return Path(locations[0]) if locations else None


@contextmanager
def importable(project_dir: Path) -> Iterator[None]:
    """Make the modules of the project importable inside the block."""
    sys.path.insert(0, str(project_dir))
    try:
        yield
    finally:
        sys.path.remove(str(project_dir))
