"""The index of this account's runs, so that commands find a run by its name from any folder."""

from __future__ import annotations

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
from slurmddp.near_matches import nearest
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder, state_dir
from slurmddp.runs.folder.owner import account
from slurmddp.settings.spec import END_OF_RUN_NAME
from slurmddp.short_text import first_items

SWEEP_SUFFIX = ".sweep"
"""End of the name of a file that lists the runs of a sweep."""
_CONFIG = str(RunFolder.config_file)
_WRITTEN = (str(RunFolder.attempts_file), str(RunFolder.metrics_file))
"""Files that change while a run trains; the newest of their times is the time of the run."""

log = logging.getLogger(__name__)


def index_file() -> Path:
    """Return the path of the index of this account's runs: `$XDG_STATE_HOME/slurmddp/runs.jsonl`."""
    return state_dir() / "runs.jsonl"


def remember(*folders: RunFolder) -> None:
    """Add the runs that the index lacks; log a warning if the index can't be written."""
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
    """Return the existing runs in the index and in `start/runs` whose names begin with `name`.

    The run that was written to last comes first.

    Args:
        start: a folder; the current folder if missing.
        name: the beginning of a name; all names begin with the default.
    """
    return [RunFolder(path) for path in run_paths(start, name=name)]


def run_paths(start: Path | None = None, *, name: str = "") -> list[str]:
    """Return the paths of the runs that `all_runs` returns, in the same order.

    This is much faster for thousands of runs, because it creates no RunFolder objects.
    """
    local = (start or working_folder()) / "runs"
    entries = sorted(local.iterdir()) if local.is_dir() else []
    # Names with a leading dot are left out: such a folder is a run that is being created.
    local_runs = [str(path.absolute()) for path in entries if not path.name.startswith(".") and path.is_dir()]

    try:
        indexed = _indexed(index_file())
    except OSError as error:
        log.warning("The list of runs can't be read: %s", error)
        indexed = []

    # Names are compared before times: asking a network file system for the times of thousands of folders
    # takes seconds.
    named = [path for path in (*indexed, *local_runs) if path.rpartition("/")[2].startswith(name)]
    dated = [(last_touched(path), path) for path in _without_twins(named)]
    existing = [(touched, path) for touched, path in dated if touched is not None]
    return [path for _, path in sorted(existing, reverse=True)]


def parents() -> list[Path]:
    """Return the folders that hold run folders: `./runs`, and the parent folders of the runs in the index."""
    try:
        indexed = _indexed(index_file())
    except OSError:
        indexed = []
    folders = {os.path.dirname(path): None for path in indexed}  # noqa: PTH120

    first: dict[str, Path] = {}
    for folder in (working_folder() / "runs", *map(Path, folders)):
        first.setdefault(os.path.realpath(folder), folder)
    return list(first.values())


def sweep_files(name: str | None) -> list[Path]:
    """Return the files of the sweeps with this name, or else of the sweeps whose names begin with it.

    If `name` is only the beginning of a name and does not contain "sweep", it may mean a run. The result is
    then empty.
    """
    if not name or "/" in name:
        return []

    pattern = f"{glob.escape(name)}*{SWEEP_SUFFIX}"
    files = [file for parent in parents() for file in sorted(parent.glob(pattern))]
    exact = [file for file in files if file.name == f"{name}{SWEEP_SUFFIX}"]
    if exact or "sweep" not in name:
        return exact
    return files


def sweeps_of_name(name: str) -> list[Path]:
    """Return the files of the sweeps that were started with `name=NAME`: `gpt` for `gpt-sweep-0a1b2c3d`."""
    # A text with a slash is a path: no run has a slash in its name.
    if "/" in name:
        return []
    pattern = f"{glob.escape(name)}-sweep-{'[0-9a-f]' * 8}{SWEEP_SUFFIX}"
    return [file for parent in parents() for file in sorted(parent.glob(pattern))]


def find(name: str | None, start: Path | None = None) -> RunFolder:
    """Return the run that a person means by its name, the beginning of its name, or its path.

    Args:
        name: the name or path; None for the run that was written to last.
        start: the folder to which a path is relative, and whose `runs` folder takes precedence; the current
            folder if missing.

    Raises:
        RunNotFoundError: no run matches, or several runs match.
    """
    folder = start or working_folder()
    # A text with a slash is a path: no run has a slash in its name.
    if name and "/" in name and _is_file(folder / name / RunFolder.config_file):
        return _at(folder / name)

    runs = all_runs(folder, name=name or "")
    if name is None:
        if not runs:
            raise _unknown("", runs)
        return runs[0]

    exact = [run for run in runs if run.name == name]
    path = folder / name
    if not exact and name and _is_file(path / RunFolder.config_file):
        return _at(path)

    fitting = exact or [run for run in runs if name and run.name.startswith(name)]
    fitting = _preferred(fitting, name, folder)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise _ambiguous(name, fitting)
    if name and _is_private(path):
        raise RunNotFoundError(
            f"{path} belongs to {account(path.stat().st_uid)}, who keeps it private.",
            hint=f"That account can open it to readers: chmod -R go+rX {shlex.quote(str(path))}",
        )
    raise _unknown(name, all_runs(folder))


def _preferred(runs: list[RunFolder], name: str, folder: Path) -> list[RunFolder]:
    """Return the runs that a person most likely means by `name`, with which the names of all `runs` begin.

    Args:
        runs: runs whose names begin with `name`.
        name: the text that a person typed.
        folder: the folder whose `runs` folder takes precedence.
    """
    runs = _without_put_aside(runs)
    # `name=exp` makes the run exp-0a1b2c3d, so `exp` means that run, although exp2-... begins with it, too.
    runs = [run for run in runs if re.fullmatch(END_OF_RUN_NAME, run.name.removeprefix(name))] or runs
    # Runs in `folder/runs` take precedence over runs elsewhere.
    local = os.path.realpath(folder / "runs")
    return [run for run in runs if os.path.realpath(run.path.parent) == local] or runs


def _at(path: Path) -> RunFolder:
    """Return the run in the folder `path`."""
    # The link is resolved, because it may have another name than the run folder to which it leads.
    if path.is_symlink():
        return RunFolder(path.resolve())
    return RunFolder(os.path.normpath(path))


def _without_twins(paths: Iterable[str]) -> list[str]:
    """Return `paths` with only the first of several paths to one run folder.

    Two paths may name one folder if a folder above it is reached through a symbolic link.
    """
    physical = cache(os.path.realpath)
    first: dict[tuple[str, str], str] = {}
    for path in paths:
        parent, _, name = path.rpartition("/")
        first.setdefault((physical(parent), name), path)
    return list(first.values())


def _without_put_aside(runs: list[RunFolder]) -> list[RunFolder]:
    """Return `runs` without each NAME.old-N that `train --again` has renamed, if NAME is among the runs."""
    names = {run.name for run in runs}
    return [run for run in runs if run.name.rpartition(".old-")[0] not in names]


def _indexed(path: Path) -> list[str]:
    """Return the absolute paths in the index file; log a warning for each damaged line and skip it."""
    try:
        lines = read_regular(path).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []

    paths = []
    for line in lines:
        try:
            paths.append(os.path.abspath(json.loads(line)["path"]))  # noqa: PTH100
        except (ValueError, TypeError, KeyError):
            log.warning("A damaged line in the list of runs is skipped: %s", path)
    return paths


def last_touched(path: str) -> float | None:
    """Return when a run's configuration, events or metrics were last modified, in seconds since the epoch.

    The result is None if the folder holds no run.
    """
    configured = _written_at(f"{path}/{_CONFIG}")
    if configured is None:
        return None
    written = [_written_at(f"{path}/{name}") for name in _WRITTEN]
    return max([configured, *(time for time in written if time is not None)])


def _written_at(file: str) -> float | None:
    """Return when a regular file was last modified, in epoch seconds; None if there is no such file."""
    try:
        # os.stat, because for thousands of files creating the Path objects would take longer than the calls.
        status = os.stat(file)  # noqa: PTH116
    except (OSError, ValueError):
        # The folder belongs to another account, or its file system is gone.
        return None
    return status.st_mtime if stat.S_ISREG(status.st_mode) else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # The folder belongs to another account, or its file system is gone.
        return False


def _is_private(path: Path) -> bool:
    try:
        return path.is_dir() and not os.access(path, os.R_OK | os.X_OK)
    except OSError:
        return False


def _ambiguous(name: str, runs: list[RunFolder]) -> RunNotFoundError:
    """Return the error for a text that is the name or the beginning of the name of several runs."""
    if len({run.path.parent for run in runs}) > 1:
        listed = first_items([run.path for run in runs], 5)
    else:
        listed = first_items([run.name for run in runs], 5)

    hint = "Give more of the name."
    if len({run.name for run in runs}) < len(runs):
        hint = "Give the folder of the run."
    sweeps = [file.name.removesuffix(SWEEP_SUFFIX) for file in sweeps_of_name(name)]
    if sweeps:
        hint += f" The whole {'sweep is' if len(sweeps) == 1 else 'sweeps are'} {first_items(sweeps, 5)}."
    return RunNotFoundError(f"{name!r} matches {len(runs)} runs: {listed}.", hint=hint)


def _unknown(name: str, runs: list[RunFolder]) -> RunNotFoundError:
    """Return the error for a text that means no run, with a hint.

    Args:
        name: the text; empty if the newest run was asked for.
        runs: all known runs.
    """
    files = sweep_files(name)
    if files:
        sweep = files[0].name.removesuffix(SWEEP_SUFFIX)
        return RunNotFoundError(
            f"{name!r} is a sweep, and this command takes one run.",
            hint=f"`slurmddp list {sweep}` shows its runs.",
        )

    if not runs:
        what = f"There is no run named {name!r}" if name else "There is no run yet"
        return RunNotFoundError(
            f"{what}: neither ./runs nor {index_file()} names any run.",
            hint="Start a run with `slurmddp train`.",
        )

    names = sorted({run.name for run in runs})
    # Names are compared with and without the digits at their end, which people rarely remember.
    near = [known for known in names if nearest(name, (known, known.rpartition("-")[0]))]
    hint = "`slurmddp list` shows all runs."
    if near:
        hint = f"Did you mean {' or '.join(near[:3])}? {hint}"
    elif len(names) <= 5:
        hint = f"The runs are {', '.join(names)}."
    return RunNotFoundError(f"There is no run named {name!r}.", hint=hint)
