"""Sorts the files of a project into code, data beside it, and secrets, by what git says of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

_SECRETS = (".env*", "*.pem", "*.key", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", ".pypirc")
"""Names of files that hold passwords and keys."""
_CACHES = frozenset({
    "__pycache__", ".git", ".hg", ".venv", "venv", ".tox", ".nox", ".eggs", "node_modules", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".idea", ".vscode", ".DS_Store",
})  # fmt: skip
"""Names of ignored entries that no training reads."""


@dataclass(frozen=True)
class ProjectFiles:
    """The entries of a project, each a path that exists."""

    code: list[Path]
    """Files that git tracks, and new ones that it does not ignore."""
    secrets: list[Path]
    """New files whose names say that they hold secrets."""
    ignored: list[Path]
    """Files and whole folders that git ignores, without caches and environments of Python."""


def git_trouble(project_dir: Path) -> str:
    """Return why git can't list the files of `project_dir`; empty when it can."""
    if shutil.which("git") is None:
        return "there is no git on this machine"
    answer = git(project_dir, "rev-parse", "--is-inside-work-tree")
    if answer.returncode == 0 and answer.stdout.strip() == b"true":
        return ""
    words = answer.stderr.decode(errors="replace").strip().splitlines()
    if words and "not a git repository" not in words[0]:
        return f"git says {words[0]!r}"
    return f"{project_dir} is not in a git repository"


def list_files(project_dir: Path, exclude: Sequence[Path]) -> ProjectFiles:
    """Return the entries of a project, without run folders and without what lies in the folders `exclude`."""
    tracked, new, ignored = _entries(project_dir)
    secrets = [path for path in new if any(fnmatch(path.name, pattern) for pattern in _SECRETS)]

    is_run = cache(_is_run)  # Many files lie in one folder.

    def is_left_out(path: Path) -> bool:
        if any(path.is_relative_to(folder) for folder in exclude):
            return True
        return any(is_run(folder) for folder in (path, *path.parents) if folder.is_relative_to(project_dir))

    def taken(paths: set[Path]) -> list[Path]:
        return sorted(path for path in paths if not is_left_out(path))

    # git lists what lies in an ignored folder as well where that has a .gitignore of its own.
    topmost = {path for path in ignored if not ignored.intersection(path.parents)}
    return ProjectFiles(
        code=taken({*tracked, *new}.difference(secrets)),
        secrets=taken(set(secrets)),
        ignored=[path for path in taken(topmost) if not _is_cache(path, project_dir)],
    )


def _entries(repository: Path) -> tuple[set[Path], set[Path], set[Path]]:
    """Return the tracked, new and ignored entries of a repository and of those nested in it."""
    tracked = {path for path in _listed(repository, "--cached") if os.path.lexists(path)}
    new = set(_listed(repository, "--others", "--exclude-standard"))
    ignored = set(_listed(repository, "--others", "--ignored", "--exclude-standard", "--directory"))
    for path in sorted(tracked | new):
        if path.is_dir() and not path.is_symlink():
            tracked.discard(path)
            new.discard(path)
            if (path / ".git").exists():
                for all_of, some in zip((tracked, new, ignored), _entries(path), strict=True):
                    all_of.update(some)
    return tracked, new, ignored


def _listed(repository: Path, *which: str) -> Iterator[Path]:
    for entry in git(repository, "ls-files", "-z", *which).stdout.split(b"\0"):
        if entry:
            yield repository / os.fsdecode(entry)


def _is_run(folder: Path) -> bool:
    return (folder / "overrides.txt").exists() and (folder / "config.yaml").exists()


def _is_cache(path: Path, project_dir: Path) -> bool:
    is_environment = (path / "pyvenv.cfg").exists() or (path / "conda-meta").exists()
    named = _CACHES.intersection(path.relative_to(project_dir).parts)
    return is_environment or bool(named) or path.suffix in (".pyc", ".pyo", ".egg-info")


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`."""
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
