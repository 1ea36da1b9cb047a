"""Find the files of a project that are its code, by git where there is a repository.

A run's snapshot copies these files, ssh sends them to the login node, and a change of one of them is a change
of the code. Run folders, caches and Python environments are no code, and secrets are listed separately.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slurmddp.errors import ConfigError
from slurmddp.runs.folder import sent_code
from slurmddp.runs.folder.git import run_git, trouble_of
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.secret_files import is_secret
from slurmddp.runs.folder.sent_code import SentFile
from slurmddp.slurm.job_script import ELEMENT, ELEMENTS

MOST_MB = 200
"""Largest total size of the copied files."""
_MOST_ENTRIES = 10_000
"""Outside a git repository, a folder with more entries is not searched for Python files."""
_CACHES = frozenset({
    "__pycache__", ".git", ".hg", ".venv", "venv", ".tox", ".nox", ".eggs", "node_modules", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".idea", ".vscode", ".DS_Store",
})  # fmt: skip
"""Names of ignored entries that no training reads."""


@dataclass(frozen=True)
class ProjectFiles:
    """The entries of a project: its code, its secrets, and what git ignores; each path exists."""

    code: list[Path]
    """Files that git tracks, and new files that git does not ignore."""
    secrets: list[Path]
    """New files that may hold passwords or keys."""
    ignored: list[Path]
    """Files and whole folders that git ignores, without caches and Python environments."""


def sources(project_dir: Path, exclude: Sequence[Path] = ()) -> list[Path]:
    """Return the files that count as the code of a project, without files in the folders `exclude`.

    In a git repository these are the files that git tracks, and new Python files: a new file of another kind
    may be a result of a run. If they have more than `MOST_MB`, only the Python files among them are returned.
    Of code that came over ssh, these are all files that were sent. Elsewhere these are the Python files; none
    in a folder with more than `_MOST_ENTRIES` entries, such as a home directory.
    """
    sent = sent_code.of(project_dir)
    if sent is not None:
        return list_sent(project_dir, sent, exclude).code
    if trouble_of(project_dir):
        return _python_files(project_dir, exclude)

    tracked, new, _ = _entries(project_dir)
    python = {path for path in new if path.suffix == ".py" and not is_cache(path, project_dir)}
    code = _without_runs({*tracked, *python}, project_dir, exclude)

    if sum(path.lstat().st_size for path in code) > MOST_MB * 1e6:
        return [path for path in code if path.suffix == ".py"]
    return code


def _python_files(project_dir: Path, exclude: Sequence[Path]) -> list[Path]:
    """Return the Python files below a folder; none if the folder has more than `_MOST_ENTRIES` entries."""
    python: list[Path] = []
    entries = 0
    for name, folders, files in os.walk(project_dir):
        folder = Path(name)
        entries += len(folders) + len(files)
        if entries > _MOST_ENTRIES:
            return []
        python += [folder / file for file in files if file.endswith(".py")]

        # os.walk enters only the folders that stay in this list.
        folders[:] = [
            inner
            for inner in folders
            if not inner.startswith(".")
            and folder / inner not in exclude
            and not is_cache(folder / inner, project_dir)
            and not is_run(folder / inner)
        ]
    return sorted(python)


def refuse_large(project_dir: Path, files: Sequence[Path]) -> None:
    """Raise ConfigError if the files together are larger than `MOST_MB`."""
    sizes = {path: path.lstat().st_size for path in files}
    total_mb = sum(sizes.values()) / 1e6
    if total_mb <= MOST_MB:
        return

    largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
    named = ", ".join(f"{path.relative_to(project_dir)} ({sizes[path] / 1e6:.0f} MB)" for path in largest)
    raise ConfigError(
        f"The code in {project_dir} has {total_mb:.0f} MB, more than a snapshot may hold "
        f"({MOST_MB:g} MB). The largest files are {named}.",
        hint="Name data and results in .gitignore, or switch the snapshot off with snapshot=false.",
    )


def list_files(project_dir: Path, exclude: Sequence[Path]) -> ProjectFiles:
    """Return the code, secrets and ignored entries of a git repository, without run folders and `exclude`."""
    tracked, new, ignored = _entries(project_dir)
    secrets = [path for path in new if is_secret(path, project_dir)]

    def kept(paths: set[Path]) -> list[Path]:
        return _without_runs(paths, project_dir, exclude)

    # Only the topmost ignored folder is kept: git also lists its entries if it has a .gitignore of its own.
    topmost = {path for path in ignored if not ignored.intersection(path.parents)}
    return ProjectFiles(
        code=kept({*tracked, *new}.difference(secrets)),
        secrets=kept(set(secrets)),
        ignored=[path for path in kept(topmost) if not is_cache(path, project_dir)],
    )


def _without_runs(paths: Iterable[Path], project_dir: Path, exclude: Sequence[Path]) -> list[Path]:
    """Return the sorted `paths` that are neither in a run folder nor in a folder in `exclude`."""
    # Cached, because many files are in the same folder, and each check of a folder asks the file system.
    is_run_folder = cache(is_run)

    def is_left_out(path: Path) -> bool:
        if any(path.is_relative_to(folder) for folder in exclude):
            return True
        return any(
            is_run_folder(folder) for folder in (path, *path.parents) if folder.is_relative_to(project_dir)
        )

    return sorted(path for path in paths if not is_left_out(path))


def list_sent(project_dir: Path, sent: Sequence[SentFile], exclude: Sequence[Path]) -> ProjectFiles:
    """Return the files that were sent over ssh to `project_dir` as `code`, and other entries as `ignored`."""
    code = {project_dir / file.name for file in sent if not file.name.startswith(f"{sent_code.FOLDER}/")}
    holds_code = {folder for path in code for folder in path.parents}
    ignored: list[Path] = []

    def is_left_out(path: Path) -> bool:
        is_excluded = any(path.is_relative_to(folder) for folder in exclude)
        return is_excluded or path.name == sent_code.FOLDER or is_run(path) or is_cache(path, project_dir)

    folders = [project_dir]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path in holds_code and not path.is_symlink():
                folders.append(path)
            elif path not in code and not is_left_out(path):
                ignored.append(path)
    return ProjectFiles(code=sorted(filter(os.path.lexists, code)), secrets=[], ignored=ignored)


def _entries(repository: Path) -> tuple[set[Path], set[Path], set[Path]]:
    """Return the tracked, new and ignored entries of a repository and of the repositories nested in it."""
    tracked = {path for path in _listed(repository, "--cached") if os.path.lexists(path)}
    new = set(_listed(repository, "--others", "--exclude-standard"))
    ignored = set(_listed(repository, "--others", "--ignored", "--exclude-standard", "--directory"))

    # git lists a nested repository as a folder: a submodule as tracked, any other as new.
    for path in sorted(tracked | new):
        if path.is_dir() and not path.is_symlink():
            tracked.discard(path)
            new.discard(path)
            if (path / ".git").exists():
                nested = _entries(path)
                tracked.update(nested[0])
                new.update(nested[1])
                ignored.update(nested[2])
    return tracked, new, ignored


def _listed(repository: Path, *options: str) -> Iterator[Path]:
    result = run_git(repository, "ls-files", "-z", *options)
    if result.returncode != 0:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        trouble = repr(lines[-1]) if lines else f"exit code {result.returncode}"
        raise unreadable(repository, f"git reports {trouble}")

    for entry in result.stdout.split(b"\0"):
        if entry:
            yield repository / os.fsdecode(entry)


_MARKS = ((RunFolder.overrides_file, RunFolder.config_file), (ELEMENTS, ELEMENT))
"""Pairs of files: a folder with both files of a pair is a run folder, or the folder of an array."""


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder, or the folder of an array."""
    return any((folder / first).exists() and (folder / second).exists() for first, second in _MARKS)


def is_cache(path: Path, project_dir: Path) -> bool:
    """Return whether a path is a Python environment, a compiled file, or in a folder of a cache."""
    is_environment = (path / "pyvenv.cfg").exists() or (path / "conda-meta").exists()
    caches = _CACHES.intersection(path.relative_to(project_dir).parts)
    return is_environment or bool(caches) or path.suffix in (".pyc", ".pyo", ".egg-info")


def unreadable(repository: Path, reason: str) -> ConfigError:
    """Return the error for a repository whose files git can't list.

    Args:
        repository: the folder of the repository.
        reason: the reason, as a clause.
    """
    return ConfigError(
        f"The files of {repository} can't be listed: {reason}. Nothing was started.",
        hint=f"Repair the repository until `git -C {shlex.quote(str(repository))} status` works.",
    )
