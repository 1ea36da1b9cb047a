"""Hydra's own keys: the search path is read, every other one is refused with the key that replaces it.

Hydra would use them to run a program. In slurmddp a run has a run folder, logs and a job of its own.
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
    "hydra.run": "Say runs_dir=FOLDER and name=NAME. The run folder ends in a hash, so it is found again.",
    "hydra.sweep": "Say runs_dir=FOLDER and name=NAME. Each point of a sweep has a run folder there.",
    "hydra.sweeper": "`-m` sweeps with Hydra's basic sweeper, and `-m hydra/sweeper=optuna` searches "
    "(docs/hydra.md); other sweepers are unknown.",
    "hydra.launcher": "+cluster=NAME submits. An application with @hydra.main takes hydra/launcher=slurmddp.",
    "hydra.mode": "`-m` sweeps; without it one command is one run.",
    "hydra.output_subdir": "config.yaml and overrides.txt of the run folder hold the configuration.",
    "hydra.job.name": "Say name=NAME.",
    "hydra.job.chdir": "Ranks start in the project's folder. A script gets its run folder as {run_dir}.",
    "hydra.job.env_set": "Say +cluster.env.NAME=VALUE; a local run inherits the environment.",
    "hydra.job.env_copy": "Say +cluster.env.NAME=VALUE; a local run inherits the environment.",
    "hydra.job_logging": "Each rank has a log in the run folder; `slurmddp logs RUN` prints them.",
    "hydra.hydra_logging": "`slurmddp --debug` shows where an error came from.",
    "hydra.verbose": "`slurmddp --debug` shows where an error came from.",
    "hydra.callbacks": "Say callbacks.NAME._target_=package.Class; the trainer calls its objects.",
}
"""The beginnings of keys, and the way to say the same to slurmddp."""


def is_hydras(key: str) -> bool:
    """Return whether a key or group belongs to Hydra itself."""
    return key.partition(".")[0].partition("/")[0] == "hydra"


def refusal(text: str, key: str) -> ConfigError:
    """Return the error for one of Hydra's keys that slurmddp does not read.

    Args:
        text: the setting as it was given.
        key: its key or group, such as `hydra.run.dir` or `hydra/launcher`.
    """
    dotted = key.replace("/", ".")
    found = [known for known in _INSTEAD if f"{dotted}.".startswith(f"{known}.")]
    return ConfigError(
        f"{text!r} sets Hydra itself, which slurmddp uses only to compose configurations.",
        hint=_INSTEAD[found[0]] if found else "Leave it out; docs/hydra.md lists Hydra's keys.",
    )


def search_path(section: Any, where: str) -> list[str]:
    """Return the search path of the `hydra` section of a file; raises ConfigError for other keys."""
    if not isinstance(section, Mapping):
        raise refusal(f"hydra: {section} in {where}", "hydra")
    for key in section:
        if key != "searchpath":
            inner = section[key]
            names = [f".{name}" for name in inner] if isinstance(inner, Mapping) else [""]
            raise refusal(f"hydra.{key}{names[0]} in {where}", f"hydra.{key}{names[0]}")
    return texts(section.get("searchpath"), where)


def texts(value: Any, where: str) -> list[str]:
    """Return the entries of a search path; raises ConfigError if it is not a list of texts."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(
            f"`{SEARCH_PATH}` in {where} is {value!r}, not a list of folders.",
            hint=f"For example {SEARCH_PATH}=[file://shared/conf,pkg://my_package.conf].",
        )
    return value


def folders(entries: Sequence[str], project_dir: Path) -> list[Path]:
    """Return the folders of a search path: `file://FOLDER`, `pkg://package.module` or a plain path."""
    found = []
    for entry in entries:
        scheme, _, rest = entry.rpartition("://")
        if scheme not in ("", "file", "pkg"):
            raise ConfigError(f"The search path has {entry!r}.", hint="Write file://FOLDER or pkg://PACKAGE.")
        folder = _package(rest, project_dir) if scheme == "pkg" else project_dir / Path(rest).expanduser()
        if folder is None or not folder.is_dir():
            what = f"package {rest}" if scheme == "pkg" else f"folder {folder}"
            raise ConfigError(
                f"The search path has {entry!r}, and there is no {what}.",
                hint=f"A relative path begins in {project_dir}.",
            )
        found.append(folder)
    return found


def _package(name: str, project_dir: Path) -> Path | None:
    with importable(project_dir):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
    places = list((spec and spec.submodule_search_locations) or ())
    return Path(places[0]) if places else None


@contextmanager
def importable(project_dir: Path) -> Iterator[None]:
    """Let modules of the project be imported meanwhile."""
    sys.path.insert(0, str(project_dir))
    try:
        yield
    finally:
        sys.path.remove(str(project_dir))
