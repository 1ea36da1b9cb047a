"""The project's code as it was at submission, so that a job that waits or comes back runs what was meant.

Taken are the files that git tracks or would offer to track, so uncommitted work comes along and data, builds
and checkpoints stay out. The commit and the difference from it are kept beside them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import ConfigError

SIZE_CAP_MB = 200
RECORD = ".snapshot"
"""Folder inside the snapshot that holds `commit.txt` and `diff.patch`."""


@dataclass(frozen=True)
class Snapshot:
    """What was copied; `note` says it, or why nothing was, in one sentence."""

    files: int
    commit: str | None
    note: str


def take(
    project_dir: Path, target: Path, *, exclude: Sequence[Path] = (), size_cap_mb: float = SIZE_CAP_MB
) -> Snapshot:
    """Copy the code of `project_dir` into the new folder `target`, less the folders in `exclude`.

    Outside a git repository nothing is created and the note says so; ConfigError when it is too large.
    """
    trouble = _git_trouble(project_dir)
    if trouble:
        return Snapshot(0, None, f"No snapshot of the code: {trouble}. Jobs import it from {project_dir}.")
    files = [path for path in _files(project_dir) if not _is_left_out(path, project_dir, exclude)]
    _refuse_large(project_dir, files, size_cap_mb)
    for path in files:
        copy = target / path.relative_to(project_dir)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy, follow_symlinks=False)
        if not copy.is_symlink():
            copy.chmod(copy.stat().st_mode & ~0o022)
    return _record(project_dir, target, len(files))


def _record(project_dir: Path, target: Path, count: int) -> Snapshot:
    commit = _git(project_dir, "rev-parse", "--verify", "--quiet", "HEAD").stdout.decode().strip() or None
    record = target / RECORD
    record.mkdir(parents=True, exist_ok=True)
    (record / "commit.txt").write_text(f"{commit or 'no commit yet'}\n", encoding="utf-8")
    diff = b""
    if commit:
        diff = _git(project_dir, "diff", "--no-ext-diff", "--no-color", "--binary", "HEAD", "--", ".").stdout
        (record / "diff.patch").write_bytes(diff)
    what = "no commit yet" if not commit else f"commit {commit}{', with uncommitted changes' if diff else ''}"
    return Snapshot(count, commit, f"Snapshot of {count} files of {project_dir}: {what}.")


def _git_trouble(project_dir: Path) -> str:
    """Return why git can't list the files of `project_dir`; empty when it can."""
    if shutil.which("git") is None:
        return "there is no git on this machine"
    answer = _git(project_dir, "rev-parse", "--is-inside-work-tree")
    if answer.returncode == 0 and answer.stdout.strip() == b"true":
        return ""
    words = answer.stderr.decode(errors="replace").strip().splitlines()
    if words and "not a git repository" not in words[0]:
        return f"git says {words[0]!r}"
    return f"{project_dir} is not in a git repository"


def _files(folder: Path) -> Iterator[Path]:
    """Yield tracked and not ignored files that exist, those of nested repositories included."""
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
    for name in sorted({os.fsdecode(entry) for entry in listed.split(b"\0") if entry}):
        path = folder / name
        if path.is_symlink() or path.is_file():
            yield path
        elif path.is_dir() and (path / ".git").exists():
            yield from _files(path)


def _is_left_out(path: Path, project_dir: Path, exclude: Sequence[Path]) -> bool:
    """Tell whether `path` lies in an excluded folder or in a run folder, which is never code."""
    if any(path.is_relative_to(folder) for folder in exclude):
        return True
    inside = [parent for parent in path.parents if parent.is_relative_to(project_dir)]
    return any((parent / "overrides.txt").exists() and (parent / "config.yaml").exists() for parent in inside)


def _refuse_large(project_dir: Path, files: Sequence[Path], size_cap_mb: float) -> None:
    sizes = {path: path.lstat().st_size for path in files}
    total_mb = sum(sizes.values()) / 1e6
    if total_mb <= size_cap_mb:
        return
    largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
    named = ", ".join(f"{path.relative_to(project_dir)} ({sizes[path] / 1e6:.0f} MB)" for path in largest)
    raise ConfigError(
        f"The code in {project_dir} comes to {total_mb:.0f} MB, more than a snapshot may hold "
        f"({size_cap_mb:g} MB). Largest: {named}.",
        hint="Name data and results in .gitignore, or switch the snapshot off with snapshot=false.",
    )


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
