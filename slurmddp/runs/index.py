"""The index of this account's runs, so that commands find a run by its name from any folder."""

from __future__ import annotations

import difflib
import glob
import json
import logging
import os
import re
import shlex
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from slurmddp.errors import RunNotFoundError
from slurmddp.host.regular_file import read_regular
from slurmddp.host.working_folder import working_folder
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder, state_dir
from slurmddp.runs.folder.owner import account
from slurmddp.settings.spec import END_OF_RUN_NAME
from slurmddp.short_text import first_items

SWEEP_SUFFIX = ".sweep"
"""The end of the name of a file that lists the runs of a sweep."""
_CONFIG = str(RunFolder.config_file)
_WRITTEN = (str(RunFolder.attempts_file), str(RunFolder.metrics_file))
"""Files that a run writes to while it trains."""

log = logging.getLogger(__name__)


def index_file() -> Path:
    """Return the file that lists this account's runs: `$XDG_STATE_HOME/slurmddp/runs.jsonl`."""
    return state_dir() / "runs.jsonl"


def remember(*folders: RunFolder) -> None:
    """Add runs to the index, each once; only warn if the index can't be written."""
    try:
        path = index_file()
        known = set(_indexed(path))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = [folder for folder in folders if str(folder.path) not in known]
        if new:
            append_line(path, *({"name": folder.name, "path": str(folder.path)} for folder in new))
    except OSError as error:
        paths = ", ".join(str(folder.path) for folder in folders)
        log.warning("The list of runs can't be written (%s); find %s by its path.", error, paths)


def all_runs(start: Path | None = None, *, name: str = "") -> list[RunFolder]:
    """Return all existing runs of the index and of `./runs` whose names begin so, the last written first."""
    return [RunFolder(path) for path in run_paths(start, name=name)]


def run_paths(start: Path | None = None, *, name: str = "") -> list[str]:
    """Return the paths of `all_runs`; much faster, since thousands of runs are touched and few are shown."""
    local = (start or working_folder()) / "runs"
    here = sorted(local.iterdir()) if local.is_dir() else []
    # A name with a dot is a run folder that is being created.
    found = [str(path.absolute()) for path in here if not path.name.startswith(".") and path.is_dir()]
    try:
        known = _indexed(index_file())
    except OSError as error:
        log.warning("The list of runs can't be read: %s", error)
        known = []
    # A look at each of thousands of folders takes seconds on a network file system.
    paths = _without_twins(path for path in (*known, *found) if path.rpartition("/")[2].startswith(name))
    dated = [(last_touched(path), path) for path in paths]
    alive = [(when, path) for when, path in dated if when is not None]
    return [path for _, path in sorted(alive, reverse=True)]


def parents() -> list[Path]:
    """Return the folders in which runs lie: `./runs`, and those of the index."""
    try:
        known = _indexed(index_file())
    except OSError:
        known = []
    folders = {os.path.dirname(path): None for path in known}  # noqa: PTH120
    first: dict[str, Path] = {}
    for folder in (working_folder() / "runs", *map(Path, folders)):
        first.setdefault(os.path.realpath(folder), folder)
    return list(first.values())


def sweep_files(name: str | None) -> list[Path]:
    """Return the file of the sweep with this name, else of sweeps whose names begin so.

    Empty if a run may be meant: the beginning of a sweep's name includes the word `sweep`.
    """
    if not name or "/" in name:
        return []
    pattern = f"{glob.escape(name)}*{SWEEP_SUFFIX}"
    files = [file for parent in parents() for file in sorted(parent.glob(pattern))]
    exact = [file for file in files if file.name == f"{name}{SWEEP_SUFFIX}"]
    return exact or (files if "sweep" in name else [])


def sweeps_of_name(name: str) -> list[Path]:
    """Return the files of the sweeps whose runs have this name: `gpt` for `gpt-sweep-0a1b2c3d`."""
    pattern = f"{glob.escape(name)}-sweep-{'[0-9a-f]' * 8}{SWEEP_SUFFIX}"
    return [] if "/" in name else [file for parent in parents() for file in sorted(parent.glob(pattern))]


def find(name: str | None, start: Path | None = None) -> RunFolder:
    """Return the run with this name, prefix of a name, or path, with None the run that was written last.

    Raises:
        RunNotFoundError: there is no such run, or there are several.
    """
    here = start or working_folder()
    # No name of a run has a slash.
    if name and "/" in name and _is_file(here / name / RunFolder.config_file):
        return _at(here / name)
    runs = all_runs(here, name=name or "")
    if name is None:
        if not runs:
            raise _unknown("", runs)
        return runs[0]
    exact = [run for run in runs if run.name == name]
    path = here / name
    if not exact and name and _is_file(path / RunFolder.config_file):
        return _at(path)
    found = exact or [run for run in runs if name and run.name.startswith(name)]
    found = _without_put_aside(found)
    # `name=exp` makes the run exp-0a1b2c3d, so `exp` names it though exp2-... begins alike.
    found = [run for run in found if re.fullmatch(END_OF_RUN_NAME, run.name.removeprefix(name))] or found
    # Of runs in several folders, those in this folder's `runs/` are meant.
    own = os.path.realpath(here / "runs")
    found = [run for run in found if os.path.realpath(run.path.parent) == own] or found
    if len(found) == 1:
        return found[0]
    if not found and name and _is_private(path):
        raise RunNotFoundError(
            f"{path} belongs to {account(path.stat().st_uid)}, who keeps it private.",
            hint=f"That account can open it to readers: chmod -R go+rX {shlex.quote(str(path))}",
        )
    raise _ambiguous(name, found) if found else _unknown(name, all_runs(here))


def _at(path: Path) -> RunFolder:
    """Return the run in a folder; a link to a run folder has a name of its own."""
    return RunFolder(path.resolve() if path.is_symlink() else os.path.normpath(path))


def _without_twins(paths: Iterable[str]) -> list[str]:
    """Return each run folder once, by its first path, if its parent folder is reached by several paths."""
    physical = cache(os.path.realpath)
    first: dict[tuple[str, str], str] = {}
    for path in paths:
        parent, _, name = path.rpartition("/")
        first.setdefault((physical(parent), name), path)
    return list(first.values())


def _without_put_aside(found: list[RunFolder]) -> list[RunFolder]:
    """Leave out runs that `train --again` has renamed to NAME.old-1 if NAME is among the found."""
    names = {run.name for run in found}
    return [run for run in found if run.name.rpartition(".old-")[0] not in names]


def _indexed(path: Path) -> list[str]:
    """Return the absolute paths in the index; a damaged line costs only its run."""
    try:
        lines = read_regular(path).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(os.path.abspath(json.loads(line)["path"]))  # noqa: PTH100
        except (ValueError, TypeError, KeyError):
            log.warning("A damaged line in the list of runs is passed over: %s", path)
    return found


def last_touched(path: str) -> float | None:
    """Return when a run was last written to; None if the folder holds no run."""
    written = _written_at(f"{path}/{_CONFIG}")
    if written is None:
        return None
    others = (_written_at(f"{path}/{name}") for name in _WRITTEN)
    return max([written, *(one for one in others if one is not None)])


def _written_at(file: str) -> float | None:
    """Return when a file was last written to; None without such a file, or if it can't be seen."""
    try:
        found = os.stat(file)  # noqa: PTH116 - a Path costs more than the call, thousands of times
    except (OSError, ValueError):  # Another account's folder, or a file system that is gone.
        return None
    return found.st_mtime if stat.S_ISREG(found.st_mode) else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # Another account's folder, or a file system that is gone.
        return False


def _is_private(path: Path) -> bool:
    try:
        return path.is_dir() and not os.access(path, os.R_OK | os.X_OK)
    except OSError:
        return False


def _ambiguous(name: str, found: list[RunFolder]) -> RunNotFoundError:
    same = len({run.name for run in found}) < len(found)
    apart = len({run.path.parent for run in found}) > 1
    listed = first_items([run.path if apart else run.name for run in found], 5)
    hint = "Give the folder of the one you mean." if same else "Give more of the name."
    sweeps = [file.name.removesuffix(SWEEP_SUFFIX) for file in sweeps_of_name(name)]
    if sweeps:
        hint += f" The whole {'sweep is' if len(sweeps) == 1 else 'sweeps are'} {first_items(sweeps, 5)}."
    return RunNotFoundError(f"{name!r} fits {len(found)} runs: {listed}.", hint=hint)


def _unknown(name: str, runs: list[RunFolder]) -> RunNotFoundError:
    if files := sweep_files(name):
        sweep = files[0].name.removesuffix(SWEEP_SUFFIX)
        return RunNotFoundError(
            f"{name!r} is a sweep, and this command takes one run.",
            hint=f"`slurmddp list {sweep}` shows its runs.",
        )
    if not runs:
        what = f"There is no run named {name!r}" if name else "There is no run yet"
        return RunNotFoundError(
            f"{what}: neither ./runs nor {index_file()} names any.", hint="Start one with `slurmddp train`."
        )
    names = sorted({run.name for run in runs})
    # People remember the first part of a name; the digits at its end only blur the comparison.
    near = [one for one in names if difflib.get_close_matches(name, (one, one.rpartition("-")[0]), n=1)]
    hint = "`slurmddp list` shows all."
    if near:
        hint = f"Did you mean {' or '.join(near[:3])}? {hint}"
    elif len(names) <= 5:
        hint = f"There are: {', '.join(names)}."
    return RunNotFoundError(f"There is no run named {name!r}.", hint=hint)
