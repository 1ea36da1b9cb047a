"""Copy the project's code at submission, so that a job that waits or is requeued runs this code.

The snapshot copies the files that git tracks or would offer to track, uncommitted work included. It links
data that git ignores and untracked files with secrets: a script finds them beside its `__file__`, and the run
folder holds no copy of them. The snapshot records the commit and the difference from it. If the code came
over ssh, the snapshot copies exactly the files that were sent, and links everything else in the folder.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from slurmddp.errors import ConfigError
from slurmddp.host.hard_link import link
from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder import sent_code
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.secret_files import is_secret, is_secret_folder
from slurmddp.runs.folder.sent_code import SentFile
from slurmddp.runs.text_format import counted
from slurmddp.short_text import first_items
from slurmddp.slurm.job_script import ELEMENT, ELEMENTS

_MOST_MB = 200
"""Largest total size of the copied files."""
RECORD = sent_code.FOLDER
"""Folder inside the snapshot with `commit.txt`, `diff.patch` and `files.json`, the names of its files."""
_MOST_LINKS = 1000
"""Largest number of ignored entries that are all linked; of more entries, only folders are linked."""
_MOST_ENTRIES = 10_000
"""Outside a git repository, a folder with more entries is not searched for Python files."""
_CODE_DOTFILES = frozenset({".gitignore", ".gitattributes", ".python-version"})
"""Names with a leading dot that belong to the code of a project outside a git repository."""
_CACHES = frozenset({
    "__pycache__", ".git", ".hg", ".venv", "venv", ".tox", ".nox", ".eggs", "node_modules", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".idea", ".vscode", ".DS_Store",
})  # fmt: skip
"""Names of ignored entries that no training reads."""
_OTHER_REPOSITORY = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE",
    "GIT_PREFIX",
})  # fmt: skip
"""Variables that make git use another repository than the folder's; git sets them for its hooks."""
_PATCH = (
    "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "--submodule=short", "--src-prefix=a/",
    "--dst-prefix=b/",
)  # fmt: skip
"""Options of `git diff` that give a patch which `git apply` accepts, whatever a person's settings are."""
NOT_IN_GIT = "is not in a git repository"
"""Part of the description of a run without a copy of its code."""
_GIT_REPORTS = "git reports "
_NO_COMMIT = "no commit"


def take(project_dir: Path, target: Path, *, exclude: Sequence[Path] = ()) -> str:
    """Copy the code of `project_dir` into the new folder `target`, without the folders in `exclude`.

    Outside a git repository nothing is created, unless the code came over ssh.

    Returns:
        A description of the copy, or the reason why nothing was copied.

    Raises:
        ConfigError: the code is larger than `_MOST_MB`, or git can't list it.
    """
    sent = sent_code.of(project_dir)
    if sent:
        files = _list_sent(project_dir, sent, exclude)
    else:
        trouble = _git_trouble(project_dir)
        if trouble:
            return f"No snapshot of the code: {trouble}. Jobs import it from {project_dir}."
        files = _list_files(project_dir, exclude)
    _refuse_large(project_dir, files.code)

    ignored = files.ignored
    if len(ignored) > _MOST_LINKS:
        ignored = [path for path in ignored if path.is_dir()]
    links = [*files.secrets, *ignored]
    _fill(target, files.code, links, project_dir)

    names = [str(path.relative_to(project_dir)) for path in (*files.code, *links)]
    state = _record(project_dir, target, names, is_sent=bool(sent))
    # The digests are compared after the copy: until then the files may still change.
    if sent:
        _refuse_changed(sent, project_dir, target)

    note = f"Snapshot of {counted(len(files.code), 'file')} of {project_dir}: {state}."
    note += _links_note(names[len(files.code) :], len(files.ignored) - len(ignored))
    return note + _outside_note(project_dir)


def _fill(target: Path, code: Sequence[Path], links: Sequence[Path], project_dir: Path) -> None:
    """Copy the paths of the code into the snapshot, and link the other paths."""
    places = {path: target / path.relative_to(project_dir) for path in (*code, *links)}
    for place in places.values():
        place.parent.mkdir(parents=True, exist_ok=True)

    for path in code:
        _copy(path, places[path])
    for path in links:
        places[path].symlink_to(path)
    # Only now it is known which targets of relative links the snapshot holds.
    for path in code:
        _keep_leading(path, places[path], project_dir)


def code_of(project_dir: Path) -> ProjectFiles:
    """Return the files of a project's code, without caches and run folders; secrets stand apart.

    In a git repository the code is all files that git tracks or would offer to track. Elsewhere it is every
    file without a leading dot in its path.

    Raises:
        ConfigError: the code is larger than `_MOST_MB`, or its git repository can't be read.
    """
    trouble = _git_trouble(project_dir)
    # Without the answer of git, the files that .gitignore names would be sent, too.
    if trouble.startswith(_GIT_REPORTS):
        raise _unreadable(project_dir, trouble)
    files = _walk(project_dir) if trouble else _list_files(project_dir, ())

    # Sockets and pipes are no code, and reading a pipe would never end.
    code = [path for path in files.code if path.is_symlink() or path.is_file()]
    # The project may itself have come over ssh.
    code = [path for path in code if not path.is_relative_to(project_dir / RECORD)]
    _refuse_large(project_dir, code)
    return ProjectFiles(code=code, secrets=files.secrets, ignored=[])


def state_of(project_dir: Path) -> dict[str, bytes]:
    """Return the commit of a project and the difference from it, as the files of a snapshot's record.

    The difference is missing if git can't compute it.
    """
    commit = b""
    if _has_git():
        commit = _git(project_dir, "rev-parse", "--verify", "--quiet", "HEAD").stdout
    if not commit.strip():
        return {"commit.txt": f"{_NO_COMMIT}\n".encode()}

    diff = _git(project_dir, "diff", *_PATCH, "HEAD", "--", ".")
    if diff.returncode != 0:
        return {"commit.txt": commit}
    return {"commit.txt": commit, "diff.patch": diff.stdout}


def sources(project_dir: Path, exclude: Sequence[Path] = ()) -> list[Path]:
    """Return the files of a project whose change is a change of its code, without the folders `exclude`.

    In a git repository these are the files that git tracks, and new Python files. A new file of another kind
    may be a result of a run. Of code that came over ssh these are all files that were sent. Elsewhere, and
    if the files are larger than a snapshot may be, these are the Python files. No files are returned for a
    folder with too many entries to look through, such as a home directory.
    """
    sent = sent_code.of(project_dir)
    if sent is not None:
        return _list_sent(project_dir, sent, exclude).code
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

        # os.walk enters only the folders that stay in this list.
        folders[:] = [
            inner
            for inner in folders
            if not inner.startswith(".")
            and folder / inner not in exclude
            and not _is_cache(folder / inner, project_dir)
            and not _is_run(folder / inner)
        ]
    return sorted(python)


def _copy(path: Path, copy: Path) -> None:
    shutil.copy2(path, copy, follow_symlinks=False)
    # Jobs run the copy, so no other account may write into it, whatever the original allows.
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
    note = ""
    if links:
        note += f" Linked to the project, not copied: {first_items(links, 10)}."
    if left_out:
        note += f" Neither copied nor linked: {left_out} ignored files."
    # The name of a file may hold bytes that are no text.
    return note.encode(errors="backslashreplace").decode()


def _outside_note(project_dir: Path) -> str:
    """Return a sentence about the editable installs of this Python from folders outside the project."""
    installs: dict[str, Path] = {}
    for distribution in metadata.distributions():
        # PEP 610: pip records the folder of an editable install in this file. Other tools may write it, too.
        with suppress(OSError, ValueError, AttributeError, TypeError):
            origin = json.loads(distribution.read_text("direct_url.json") or "{}")
            if origin.get("dir_info", {}).get("editable"):
                folder = Path(unquote(urlsplit(origin["url"]).path))
                installs[str(distribution.metadata["Name"])] = folder

    outside = [
        f"{name} ({folder})"
        for name, folder in sorted(installs.items())
        if name != "slurmddp" and not folder.resolve().is_relative_to(project_dir.resolve())
    ]
    if not outside:
        return ""
    return f" Editable installs, imported from where they are: {', '.join(outside)}."


def _sent_state(project_dir: Path) -> dict[str, bytes]:
    """Return the commit and the difference that came with sent code."""
    files = [project_dir / RECORD / name for name in ("commit.txt", "diff.patch")]
    return {file.name: file.read_bytes() for file in files if file.exists()}


def _record(project_dir: Path, target: Path, names: Sequence[str], *, is_sent: bool) -> str:
    """Record the copied files, the commit and the difference from it; return a description of this state."""
    record = target / RECORD
    record.mkdir(parents=True, exist_ok=True)
    (record / "files.json").write_text(json.dumps(names), encoding="utf-8")
    # The folder on a login node has no repository; the laptop sent the state of its repository with the code.
    state = _sent_state(project_dir) if is_sent else state_of(project_dir)
    for name, content in state.items():
        (record / name).write_bytes(content)

    commit = (record / "commit.txt").read_text(encoding="utf-8").strip()
    diff = record / "diff.patch"
    if commit == _NO_COMMIT:
        return commit
    if not diff.exists():
        return f"commit {commit}, and git can't list the changes since"
    if diff.stat().st_size:
        return f"commit {commit}, with uncommitted changes"
    return f"commit {commit}"


def written_by_jobs(code: Path) -> list[Path]:
    """Return the paths, relative to the snapshot, of the files that a job has written into it."""
    copied = _recorded_names(code)
    # Without a record, the files of jobs can't be told from the copied ones.
    if copied is None:
        return []

    written: list[Path] = []
    for folder, folders, files in os.walk(code):
        inside = Path(folder).relative_to(code)
        if not {RECORD, "__pycache__"}.intersection(inside.parts):
            links = [name for name in folders if Path(folder, name).is_symlink()]
            written += [inside / name for name in (*files, *links) if str(inside / name) not in copied]
    return written


def carry_over(old: Path, new: Path) -> None:
    """Link the files that a job has written into the old snapshot into the new one."""
    for name in written_by_jobs(old):
        # The project may now have a file of the same name.
        with suppress(FileExistsError, NotADirectoryError):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            link(old / name, new / name)


def _recorded_names(code: Path) -> set[str] | None:
    """Return the names of the files of a snapshot; None if the folder has no record of them."""
    try:
        return set(json.loads(read_regular(code / RECORD / "files.json")))
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
        f"The code in {project_dir} has {total_mb:.0f} MB, more than a snapshot may hold "
        f"({_MOST_MB:g} MB). The largest files are {named}.",
        hint="Name data and results in .gitignore, or switch the snapshot off with snapshot=false.",
    )


@dataclass(frozen=True)
class ProjectFiles:
    """The entries of a project: its code, its secrets, and what git ignores; each path exists."""

    code: list[Path]
    """Files that git tracks, and new files that git does not ignore."""
    secrets: list[Path]
    """New files that may hold passwords or keys."""
    ignored: list[Path]
    """Files and whole folders that git ignores, without caches and Python environments."""


def _has_git() -> bool:
    return shutil.which("git") is not None


def _git_trouble(project_dir: Path) -> str:
    """Return why git can't list the files of `project_dir`; empty if it can."""
    if not _has_git():
        return "there is no git on this machine"
    result = _git(project_dir, "rev-parse", "--is-inside-work-tree")
    if result.returncode == 0 and result.stdout.strip() == b"true":
        return ""

    # git has one exit code for all its errors, so only its message names a missing repository.
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    if lines and "not a git repository" not in lines[0]:
        return f"{_GIT_REPORTS}{lines[0]!r}"
    return f"{project_dir} {NOT_IN_GIT}"


def _list_files(project_dir: Path, exclude: Sequence[Path]) -> ProjectFiles:
    """Return the entries of a project, without run folders and without entries of the folders `exclude`."""
    tracked, new, ignored = _entries(project_dir)
    secrets = [path for path in new if is_secret(path, project_dir)]

    def kept(paths: set[Path]) -> list[Path]:
        return _without_runs(paths, project_dir, exclude)

    # git also lists the entries of an ignored folder if that folder has a .gitignore.
    topmost = {path for path in ignored if not ignored.intersection(path.parents)}
    return ProjectFiles(
        code=kept({*tracked, *new}.difference(secrets)),
        secrets=kept(set(secrets)),
        ignored=[path for path in kept(topmost) if not _is_cache(path, project_dir)],
    )


def _without_runs(paths: Iterable[Path], project_dir: Path, exclude: Sequence[Path]) -> list[Path]:
    """Return paths in order, without those in run folders of the project and in the folders `exclude`."""
    # Many files lie in the same folder, and each check of a folder asks the file system.
    is_run = cache(_is_run)

    def is_left_out(path: Path) -> bool:
        if any(path.is_relative_to(folder) for folder in exclude):
            return True
        return any(is_run(folder) for folder in (path, *path.parents) if folder.is_relative_to(project_dir))

    return sorted(path for path in paths if not is_left_out(path))


def _walk(project_dir: Path) -> ProjectFiles:
    """Return the entries of a project outside a git repository, without run folders, caches and dotfiles."""
    code: list[Path] = []
    secrets: list[Path] = []
    for folder, folders, files in os.walk(project_dir):
        inside = Path(folder)
        # os.walk lists links to folders as folders, but does not enter them.
        links = [name for name in folders if (inside / name).is_symlink()]
        for path in sorted(inside / name for name in (*files, *links)):
            if is_secret(path, project_dir):
                secrets.append(path)
            elif _is_visible(path) and not _is_cache(path, project_dir):
                code.append(path)

        secrets += [inside / name for name in folders if is_secret_folder(name)]
        folders[:] = [name for name in folders if _may_hold_code(inside / name, project_dir)]
    return ProjectFiles(code=sorted(code), secrets=sorted(secrets), ignored=[])


def _may_hold_code(folder: Path, project_dir: Path) -> bool:
    return _is_visible(folder) and not _is_cache(folder, project_dir) and not _is_run(folder)


def _is_visible(path: Path) -> bool:
    return not path.name.startswith(".") or path.name in _CODE_DOTFILES


def _list_sent(project_dir: Path, sent: Sequence[SentFile], exclude: Sequence[Path]) -> ProjectFiles:
    """Return the files that were sent to a folder as its code, and all other entries as ignored entries."""
    code = {project_dir / file.name for file in sent if not file.name.startswith(f"{RECORD}/")}
    holds_code = {folder for path in code for folder in path.parents}
    ignored: list[Path] = []

    def is_left_out(path: Path) -> bool:
        is_excluded = any(path.is_relative_to(folder) for folder in exclude)
        return is_excluded or path.name == RECORD or _is_run(path) or _is_cache(path, project_dir)

    folders = [project_dir]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path in holds_code and not path.is_symlink():
                folders.append(path)
            elif path not in code and not is_left_out(path):
                ignored.append(path)
    return ProjectFiles(code=sorted(filter(os.path.lexists, code)), secrets=[], ignored=ignored)


def _refuse_changed(sent: Sequence[SentFile], project_dir: Path, target: Path) -> None:
    """Raise ConfigError if a copied file differs from the file that was sent."""
    for file in sent:
        copy = target / file.name
        # A copied link may have got another target (see `_keep_leading`).
        if file.link is not None:
            is_same = copy.is_symlink()
        else:
            is_same = file.matches(copy)
        if not is_same:
            raise ConfigError(
                f"{project_dir / file.name} is not the file that was sent over ssh: it was changed on this "
                "host, or another submission is sending its code. Nothing was started.",
                hint="Send the code again, by `slurmddp train` or `slurmddp run` from your own machine; or "
                f"remove {project_dir / sent_code.FOLDER} to make the folder a project of this host.",
            )


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
    result = _git(repository, "ls-files", "-z", *options)
    if result.returncode != 0:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        trouble = repr(lines[-1]) if lines else f"exit code {result.returncode}"
        raise _unreadable(repository, f"{_GIT_REPORTS}{trouble}")

    for entry in result.stdout.split(b"\0"):
        if entry:
            yield repository / os.fsdecode(entry)


_MARKS = ((RunFolder.overrides_file, RunFolder.config_file), (ELEMENTS, ELEMENT))
"""Pairs of files: a folder with both files of a pair is a run folder, or the folder of an array."""


def _is_run(folder: Path) -> bool:
    return any((folder / first).exists() and (folder / second).exists() for first, second in _MARKS)


def _is_cache(path: Path, project_dir: Path) -> bool:
    is_environment = (path / "pyvenv.cfg").exists() or (path / "conda-meta").exists()
    caches = _CACHES.intersection(path.relative_to(project_dir).parts)
    return is_environment or bool(caches) or path.suffix in (".pyc", ".pyo", ".egg-info")


def _unreadable(repository: Path, trouble: str) -> ConfigError:
    return ConfigError(
        f"The files of {repository} can't be listed: {trouble}. Nothing was started.",
        hint=f"Repair the repository until `git -C {shlex.quote(str(repository))} status` works.",
    )


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`, on the repository of that folder."""
    environ = {name: value for name, value in os.environ.items() if name not in _OTHER_REPOSITORY}
    # `_git_trouble` reads the messages of git, so they must be in English.
    environ["LC_ALL"] = "C"
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environ,
        check=False,
    )
