"""The project's code as it was at submission, so that a job that waits or comes back runs what was meant.

Copied are the files that git tracks or would offer to track, so uncommitted work comes along. Data that git
ignores and untracked files with secrets are linked: a script finds them beside its `__file__`, and the run
folder holds no copy of them. The commit and the difference from it are kept beside the files.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import ConfigError
from slurmddp.runs.folder.project_files import git, git_trouble, list_files

SIZE_CAP_MB = 200
RECORD = ".slurmddp"
"""Folder inside the snapshot with `commit.txt`, `diff.patch` and `files.json`, the names of its files."""
_MOST_LINKS = 1000
"""Of more ignored entries only the folders are linked."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of the code; `note` describes the copy, or the reason why nothing was copied."""

    files: int
    commit: str | None
    note: str


def take(
    project_dir: Path, target: Path, *, exclude: Sequence[Path] = (), size_cap_mb: float = SIZE_CAP_MB
) -> Snapshot:
    """Copy the code of `project_dir` into the new folder `target`, less the folders in `exclude`.

    Outside a git repository nothing is created and the note says so; ConfigError when it is too large.
    """
    trouble = git_trouble(project_dir)
    if trouble:
        return Snapshot(0, None, f"No snapshot of the code: {trouble}. Jobs import it from {project_dir}.")
    found = list_files(project_dir, exclude)
    _refuse_large(project_dir, found.code, size_cap_mb)
    ignored = found.ignored
    if len(ignored) > _MOST_LINKS:
        ignored = [path for path in ignored if path.is_dir()]
    links = [*found.secrets, *ignored]
    for path in found.code:
        _copy(path, target / path.relative_to(project_dir))
    for path in links:
        _link(path, target / path.relative_to(project_dir))
    for path in found.code:
        _keep_leading(path, target / path.relative_to(project_dir), project_dir)
    names = [str(path.relative_to(project_dir)) for path in (*found.code, *links)]
    commit, what = _record(project_dir, target, names)
    note = f"Snapshot of {len(found.code)} files of {project_dir}: {what}."
    linked = _links_note(names[len(found.code) :], len(found.ignored) - len(ignored))
    return Snapshot(len(found.code), commit, note + linked)


def _copy(path: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, copy, follow_symlinks=False)
    if not copy.is_symlink():
        copy.chmod(copy.stat().st_mode & ~0o022)


def _link(path: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(path)


def _keep_leading(path: Path, copy: Path, project_dir: Path) -> None:
    """Let the copy of a relative link lead to the project's file where the snapshot does not hold that."""
    if not path.is_symlink() or path.readlink().is_absolute():
        return
    target = os.path.normpath(path.parent.resolve() / path.readlink())
    leaves = not Path(target).is_relative_to(project_dir.resolve())
    if leaves or (path.exists() and not copy.exists()):
        copy.unlink()
        copy.symlink_to(target)


def _links_note(links: Sequence[str], left_out: int) -> str:
    more = f" and {len(links) - 10} more" if len(links) > 10 else ""
    linked = f" Linked to the project, not copied: {', '.join(links[:10])}{more}." if links else ""
    return linked + (f" Neither copied nor linked: {left_out} ignored files." if left_out else "")


def _record(project_dir: Path, target: Path, names: Sequence[str]) -> tuple[str | None, str]:
    """Record the copied files; return the commit, and a description of the state of the code."""
    commit = git(project_dir, "rev-parse", "--verify", "--quiet", "HEAD").stdout.decode().strip() or None
    record = target / RECORD
    record.mkdir(parents=True, exist_ok=True)
    (record / "files.json").write_text(json.dumps(names), encoding="utf-8")
    (record / "commit.txt").write_text(f"{commit or 'no commit yet'}\n", encoding="utf-8")
    if not commit:
        return None, "no commit yet"
    diff = git(project_dir, "diff", "--no-ext-diff", "--no-color", "--binary", "HEAD", "--", ".").stdout
    (record / "diff.patch").write_bytes(diff)
    return commit, f"commit {commit}{', with uncommitted changes' if diff else ''}"


def differences(old: Path, new: Path) -> list[str]:
    """Return the names of the files that differ between two snapshots; none where one has no record."""
    before, after = _names(old), _names(new)
    if before is None or after is None:
        return []
    both = before & after
    return sorted(name for name in before | after if name not in both or not _same(old / name, new / name))


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def written_beside(code: Path) -> list[Path]:
    """Return the files that a job has written into the folder of a snapshot, relative to it."""
    names, found = _names(code), []
    for folder, folders, files in os.walk(code) if names is not None else ():
        inside = Path(folder).relative_to(code)
        if not {RECORD, "__pycache__"}.intersection(inside.parts):
            links = [name for name in folders if Path(folder, name).is_symlink()]
            found += [inside / name for name in (*files, *links) if str(inside / name) not in (names or ())]
    return found


def carry_over(old: Path, new: Path) -> None:
    """Give a new snapshot the files that a job has written into the folder of the old one."""
    for name in written_beside(old):
        with suppress(FileExistsError, NotADirectoryError):  # The project has that name now.
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(old / name, new / name, follow_symlinks=False)
            except FileExistsError:
                raise
            except OSError:  # Another filesystem, or one without hard links.
                shutil.copy2(old / name, new / name, follow_symlinks=False)


def _names(code: Path) -> set[str] | None:
    """Return the names of the files of a snapshot; None for a folder without that record."""
    try:
        return set(json.loads((code / RECORD / "files.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


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
