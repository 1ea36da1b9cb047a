"""Copy the project's code at submission, so that a job that waits or is requeued runs this code.

The snapshot copies the files that git tracks or would offer to track, uncommitted work included. The snapshot
links data that git ignores and untracked files with secrets: a script finds them beside its `__file__`, and
the run folder holds no copy of them. The snapshot records the commit and the difference from it. If the code
came over ssh, the snapshot copies exactly the files that were sent, and links everything else in the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from slurmddp.errors import ConfigError
from slurmddp.host.hard_link import link
from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder import sent_code
from slurmddp.runs.folder.git import has_git, run_git, trouble_of
from slurmddp.runs.folder.project_files import (
    list_files,
    list_sent,
    refuse_large,
)
from slurmddp.runs.folder.sent_code import SentFile
from slurmddp.runs.text_format import counted
from slurmddp.short_text import first_items

RECORD = sent_code.FOLDER
"""Folder inside the snapshot with `commit.txt`, `diff.patch` and `files.json`, the names of its files."""
_MOST_LINKS = 1000
"""Largest number of ignored entries that are all linked; of more entries, only folders are linked."""
_PATCH = (
    "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "--submodule=short", "--src-prefix=a/",
    "--dst-prefix=b/",
)  # fmt: skip
"""Options of `git diff` that give a patch which `git apply` accepts, whatever a person's settings are."""
_NO_COMMIT = "no commit"


def take(project_dir: Path, target: Path, *, exclude: Sequence[Path] = ()) -> str:
    """Copy the code of `project_dir` into the new folder `target`, without the folders in `exclude`.

    Outside a git repository nothing is created, unless the code came over ssh.

    Returns:
        A description of the copy, or the reason why nothing was copied.

    Raises:
        ConfigError: the code is larger than `project_files.MOST_MB`, or git can't list it.
    """
    sent = sent_code.of(project_dir)
    if sent:
        files = list_sent(project_dir, sent, exclude)
    else:
        trouble = trouble_of(project_dir)
        if trouble:
            return f"No snapshot of the code: {trouble.reason}. Jobs import it from {project_dir}."
        files = list_files(project_dir, exclude)
    refuse_large(project_dir, files.code)

    ignored = files.ignored
    if len(ignored) > _MOST_LINKS:
        ignored = [path for path in ignored if path.is_dir()]
    links = [*files.secrets, *ignored]
    _fill(target, files.code, links, project_dir)

    names = [str(path.relative_to(project_dir)) for path in (*files.code, *links)]
    state = _record(project_dir, target, names, is_sent=bool(sent))
    # The copies are compared with the digests, not the originals: an original may change until it is copied.
    if sent:
        _refuse_changed(sent, project_dir, target)

    note = f"Snapshot of {counted(len(files.code), 'file')} of {project_dir}: {state}."
    note += _links_note(names[len(files.code) :], len(files.ignored) - len(ignored))
    return note + _outside_note(project_dir)


def _fill(target: Path, code: Sequence[Path], links: Sequence[Path], project_dir: Path) -> None:
    """Copy the paths in `code` into the folder `target`, and link the paths in `links` there."""
    places = {path: target / path.relative_to(project_dir) for path in (*code, *links)}
    for place in places.values():
        place.parent.mkdir(parents=True, exist_ok=True)

    for path in code:
        _copy(path, places[path])
    for path in links:
        places[path].symlink_to(path)
    # A relative link can be checked only now that all possible targets in the snapshot exist.
    for path in code:
        _keep_leading(path, places[path], project_dir)


def state_of(project_dir: Path) -> dict[str, bytes]:
    """Return the contents of `commit.txt`, a project's commit, and of `diff.patch`, its uncommitted changes.

    A project without a commit has a sentence on that in `commit.txt`. `diff.patch` is missing without a
    commit, or if git can't compute it.
    """
    commit = b""
    if has_git():
        commit = run_git(project_dir, "rev-parse", "--verify", "--quiet", "HEAD").stdout
    if not commit.strip():
        return {"commit.txt": f"{_NO_COMMIT}\n".encode()}

    diff = run_git(project_dir, "diff", *_PATCH, "HEAD", "--", ".")
    if diff.returncode != 0:
        return {"commit.txt": commit}
    return {"commit.txt": commit, "diff.patch": diff.stdout}


def _copy(path: Path, copy: Path) -> None:
    shutil.copy2(path, copy, follow_symlinks=False)
    # Jobs run the copy, so no other account may write into it, whatever the original allows.
    if not copy.is_symlink():
        copy.chmod(copy.stat().st_mode & ~0o022)


def _keep_leading(path: Path, copy: Path, project_dir: Path) -> None:
    """Replace the copy of a relative link by an absolute link if the snapshot lacks the link's target."""
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
    # Bytes of a file name that are not valid UTF-8 can't be written to the note, so they are escaped.
    return note.encode(errors="backslashreplace").decode()


def _outside_note(project_dir: Path) -> str:
    """Return a sentence that lists the editable installs from outside the project; empty without any."""
    installs: dict[str, Path] = {}
    for distribution in metadata.distributions():
        # PEP 610: pip records the folder of an editable install in direct_url.json. A file that another tool
        # wrote may have another format, so errors are ignored.
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
    """Return `commit.txt` and `diff.patch` as the laptop sent them with the code (see `state_of`)."""
    files = [project_dir / RECORD / name for name in ("commit.txt", "diff.patch")]
    return {file.name: file.read_bytes() for file in files if file.exists()}


def _record(project_dir: Path, target: Path, names: Sequence[str], *, is_sent: bool) -> str:
    """Write `files.json`, `commit.txt` and `diff.patch` into the snapshot; return a phrase about the commit.

    An example is "commit 1a2b3c, with uncommitted changes".
    """
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
        return f"commit {commit}, and git can't list later changes"
    if diff.stat().st_size:
        return f"commit {commit}, with uncommitted changes"
    return f"commit {commit}"


def written_by_jobs(code: Path) -> list[Path]:
    """Return the files in the snapshot `code` that were not copied from the project, as relative paths.

    Jobs have written these files. Empty if the snapshot has no record of the copied files.
    """
    copied = _recorded_names(code)
    # Without a record, files that jobs wrote can't be distinguished from copied files.
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
    """Create hard links in the snapshot `new` to the files that jobs have written into the snapshot `old`."""
    for name in written_by_jobs(old):
        # If the new snapshot has a file of the same name, that file is kept.
        with suppress(FileExistsError, NotADirectoryError):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            link(old / name, new / name)


def _recorded_names(code: Path) -> set[str] | None:
    """Return the paths that were copied or linked into a snapshot; None if it has no record of them."""
    try:
        return set(json.loads(read_regular(code / RECORD / "files.json")))
    except (OSError, ValueError):
        return None


def _refuse_changed(sent: Sequence[SentFile], project_dir: Path, target: Path) -> None:
    """Raise ConfigError if a file in the snapshot differs from the file that was sent over ssh."""
    for file in sent:
        copy = target / file.name
        # `_keep_leading` may have changed the target of a copied link, so the target is not compared.
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
