"""Copy the project's code at submission, so that a job that waits or is requeued runs this code.

The snapshot copies the files that git tracks or would offer to track, uncommitted work included. It links
data that git ignores and untracked files with secrets: a script finds them beside its `__file__`, and the run
folder holds no copy of them. The snapshot records the commit and the difference from it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from slurmddp.errors import ConfigError
from slurmddp.host.hard_link import link

_MOST_MB = 200
"""Size of all copied files together, at most."""
RECORD = ".slurmddp"
"""Folder inside the snapshot with `commit.txt`, `diff.patch` and `files.json`, the names of its files."""
_MOST_LINKS = 1000
"""If git ignores more entries, only folders are linked."""
_MOST_ENTRIES = 10_000
"""Outside of a git repository, a folder with more entries is not searched for Python files."""
_SECRETS = (".env*", "*.pem", "*.key", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", ".pypirc")
"""Patterns for names of files that hold passwords and keys."""
_CACHES = frozenset({
    "__pycache__", ".git", ".hg", ".venv", "venv", ".tox", ".nox", ".eggs", "node_modules", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".idea", ".vscode", ".DS_Store",
})  # fmt: skip
"""Names of ignored entries that no training reads."""


def take(project_dir: Path, target: Path, *, exclude: Sequence[Path] = ()) -> str:
    """Copy the code of `project_dir` into the new folder `target`, without the folders in `exclude`.

    Outside a git repository nothing is created.

    Returns:
        A description of the copy, or the reason why nothing was copied.

    Raises:
        ConfigError: the code is larger than `_MOST_MB`.
    """
    trouble = _git_trouble(project_dir)
    if trouble:
        return f"No snapshot of the code: {trouble}. Jobs import it from {project_dir}."
    found = _list_files(project_dir, exclude)
    _refuse_large(project_dir, found.code)
    ignored = found.ignored
    if len(ignored) > _MOST_LINKS:
        ignored = [path for path in ignored if path.is_dir()]
    links = [*found.secrets, *ignored]
    places = {path: target / path.relative_to(project_dir) for path in (*found.code, *links)}
    for place in places.values():
        place.parent.mkdir(parents=True, exist_ok=True)
    for path in found.code:
        _copy(path, places[path])
    for path in links:
        places[path].symlink_to(path)
    for path in found.code:
        _keep_leading(path, places[path], project_dir)
    names = [str(path.relative_to(project_dir)) for path in places]
    note = f"Snapshot of {len(found.code)} files of {project_dir}: {_record(project_dir, target, names)}."
    note += _links_note(names[len(found.code) :], len(found.ignored) - len(ignored))
    return note + _outside_note(project_dir)


def code_of(project_dir: Path) -> list[Path]:
    """Return the files of a project's code, without secrets, caches and run folders; raises ConfigError.

    In a git repository these are the files that git tracks or would offer to track, elsewhere all files.
    """
    if _git_trouble(project_dir):
        found = []
        for folder, folders, files in os.walk(project_dir):
            inside = Path(folder)
            links = [name for name in folders if (inside / name).is_symlink()]
            paths = [inside / name for name in (*files, *links)]
            found += [path for path in paths if not _is_secret(path) and not _is_cache(path, project_dir)]
            folders[:] = [
                name
                for name in folders
                if not _is_cache(inside / name, project_dir) and not _is_run(inside / name)
            ]
    else:
        found = _list_files(project_dir, ()).code
    _refuse_large(project_dir, found)
    return sorted(found)


def sources(project_dir: Path, exclude: Sequence[Path] = ()) -> list[Path]:
    """Return the files of a project whose change is a change of its code, without those in `exclude`.

    In a git repository these are the files that git tracks, and new Python files. A new file of another kind
    may be a result of a run. Elsewhere, and if the files are larger than a snapshot may be, these are the
    Python files. A folder with too many entries to look through, such as a home directory, has none.
    """
    if _git_trouble(project_dir):
        return _python_files(project_dir, exclude)

    tracked, new, _ = _entries(project_dir)
    python = {path for path in new if path.suffix == ".py" and not _is_cache(path, project_dir)}
    code = _without_runs({*tracked, *python}, project_dir, exclude)

    if sum(path.lstat().st_size for path in code) > _MOST_MB * 1e6:
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
        folders[:] = [
            inner
            for inner in folders
            if not inner.startswith(".")
            and folder / inner not in exclude
            and not _is_cache(folder / inner, project_dir)
            and not _is_run(folder / inner)
        ]
    return sorted(python)


def share(taken: Path, target: Path) -> None:
    """Copy the files of the snapshot `taken` into the new folder `target`.

    Hard links would be faster, but a script that writes into its own `code/` would then change other runs.
    Files that a job has written into `taken` since are left out. If `taken` does not exist, do nothing.
    """
    names = _names(taken)
    if names is None:
        return
    record = (str(path.relative_to(taken)) for path in (taken / RECORD).iterdir())
    for name in [*names, *record]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(taken / name, target / name, follow_symlinks=False)


def _copy(path: Path, copy: Path) -> None:
    shutil.copy2(path, copy, follow_symlinks=False)
    if not copy.is_symlink():
        copy.chmod(copy.stat().st_mode & ~0o022)


def _keep_leading(path: Path, copy: Path, project_dir: Path) -> None:
    """Let the copy of a relative link lead to the project's file if the snapshot lacks that file."""
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


def _outside_note(project_dir: Path) -> str:
    """Return a sentence about the editable installs of this Python from folders outside the project."""
    found = {}
    for distribution in metadata.distributions():
        # PEP 610: pip writes the place of an editable install there.
        with suppress(OSError, ValueError, AttributeError, TypeError):
            origin = json.loads(distribution.read_text("direct_url.json") or "{}")
            if origin.get("dir_info", {}).get("editable"):
                place = Path(unquote(urlsplit(origin["url"]).path))
                found[str(distribution.metadata["Name"])] = place
    outside = [
        f"{name} ({place})"
        for name, place in sorted(found.items())
        if name != "slurmddp" and not place.resolve().is_relative_to(project_dir.resolve())
    ]
    return f" Editable installs, imported from where they are: {', '.join(outside)}." if outside else ""


def _record(project_dir: Path, target: Path, names: Sequence[str]) -> str:
    """Record the copied files, the commit and the difference from it; describe the state of the code."""
    commit = _git(project_dir, "rev-parse", "--verify", "--quiet", "HEAD").stdout.decode().strip() or None
    record = target / RECORD
    record.mkdir(parents=True, exist_ok=True)
    (record / "files.json").write_text(json.dumps(names), encoding="utf-8")
    (record / "commit.txt").write_text(f"{commit or 'no commit yet'}\n", encoding="utf-8")
    if not commit:
        return "no commit yet"
    diff = _git(project_dir, "diff", "--no-ext-diff", "--no-color", "--binary", "HEAD", "--", ".").stdout
    (record / "diff.patch").write_bytes(diff)
    return f"commit {commit}{', with uncommitted changes' if diff else ''}"


def written_beside(code: Path) -> list[Path]:
    """Return the paths, relative to the snapshot, of the files that a job has written into it."""
    names, found = _names(code), []
    for folder, folders, files in os.walk(code) if names is not None else ():
        inside = Path(folder).relative_to(code)
        if not {RECORD, "__pycache__"}.intersection(inside.parts):
            links = [name for name in folders if Path(folder, name).is_symlink()]
            found += [inside / name for name in (*files, *links) if str(inside / name) not in (names or ())]
    return found


def carry_over(old: Path, new: Path) -> None:
    """Link the files that a job has written into the old snapshot into the new one."""
    for name in written_beside(old):
        with suppress(FileExistsError, NotADirectoryError):  # The project now has a file of that name.
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            link(old / name, new / name)


def _names(code: Path) -> set[str] | None:
    """Return the names of the files of a snapshot; None if the folder has no record of them."""
    try:
        return set(json.loads((code / RECORD / "files.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _refuse_large(project_dir: Path, files: Sequence[Path]) -> None:
    sizes = {path: path.lstat().st_size for path in files}
    total_mb = sum(sizes.values()) / 1e6
    if total_mb <= _MOST_MB:
        return
    largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
    named = ", ".join(f"{path.relative_to(project_dir)} ({sizes[path] / 1e6:.0f} MB)" for path in largest)
    raise ConfigError(
        f"The code in {project_dir} comes to {total_mb:.0f} MB, more than a snapshot may hold "
        f"({_MOST_MB:g} MB). Largest: {named}.",
        hint="Name data and results in .gitignore, or switch the snapshot off with snapshot=false.",
    )


@dataclass(frozen=True)
class _ProjectFiles:
    """The entries of a project, sorted by what git says of them; each path exists."""

    code: list[Path]
    """Files that git tracks, and new ones that it does not ignore."""
    secrets: list[Path]
    """New files whose names match `_SECRETS`."""
    ignored: list[Path]
    """Files and whole folders that git ignores, without caches and Python environments."""


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


def _list_files(project_dir: Path, exclude: Sequence[Path]) -> _ProjectFiles:
    """Return the entries of a project, without run folders and without entries of the folders `exclude`."""
    tracked, new, ignored = _entries(project_dir)
    secrets = [path for path in new if _is_secret(path)]

    def taken(paths: set[Path]) -> list[Path]:
        return _without_runs(paths, project_dir, exclude)

    # git also lists the entries of an ignored folder if that folder has a .gitignore.
    topmost = {path for path in ignored if not ignored.intersection(path.parents)}
    return _ProjectFiles(
        code=taken({*tracked, *new}.difference(secrets)),
        secrets=taken(set(secrets)),
        ignored=[path for path in taken(topmost) if not _is_cache(path, project_dir)],
    )


def _without_runs(paths: Iterable[Path], project_dir: Path, exclude: Sequence[Path]) -> list[Path]:
    """Return paths in order, without those in run folders of the project and in the folders `exclude`."""
    is_run = cache(_is_run)  # Many files lie in one folder.

    def is_left_out(path: Path) -> bool:
        if any(path.is_relative_to(folder) for folder in exclude):
            return True
        return any(is_run(folder) for folder in (path, *path.parents) if folder.is_relative_to(project_dir))

    return sorted(path for path in paths if not is_left_out(path))


def _entries(repository: Path) -> tuple[set[Path], set[Path], set[Path]]:
    """Return the tracked, new and ignored entries of a repository and of the repositories nested in it."""
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
    for entry in _git(repository, "ls-files", "-z", *which).stdout.split(b"\0"):
        if entry:
            yield repository / os.fsdecode(entry)


def _is_secret(path: Path) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in _SECRETS)


_MARKS = (("overrides.txt", "config.yaml"), ("elements", "element"))
"""The files that together mark a run folder, or the folder of an array."""


def _is_run(folder: Path) -> bool:
    return any((folder / one).exists() and (folder / other).exists() for one, other in _MARKS)


def _is_cache(path: Path, project_dir: Path) -> bool:
    is_environment = (path / "pyvenv.cfg").exists() or (path / "conda-meta").exists()
    named = _CACHES.intersection(path.relative_to(project_dir).parts)
    return is_environment or bool(named) or path.suffix in (".pyc", ".pyo", ".egg-info")


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`."""
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
