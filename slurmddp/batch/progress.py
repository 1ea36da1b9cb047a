"""Decide whether an attempt made progress: a newer checkpoint, or a change in the program's own files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from slurmddp.runs.folder.late_files import is_there, read_text
from slurmddp.runs.folder.layout import RunFolder


class Saved(NamedTuple):
    """The newest checkpoint and the program's own saved files, at one moment."""

    step: int = 0
    """The step of the checkpoint from which the run would resume; 0 before the first checkpoint."""
    files: str = ""
    """A hash of the names, sizes and times of the program's own files; empty if it saves no such files."""


def saved(folder: RunFolder, project: Path, pattern: str) -> Saved:
    """Return the step of the newest checkpoint, and a hash of the files that the program saves itself.

    Args:
        folder: the run folder.
        project: the project folder.
        pattern: a glob of the files or folders that the program saves, relative to `project`; may be empty.
    """
    files = _hash_of(project, pattern) if pattern else ""
    return Saved(newest_step(latest_name(folder)), files)


def progressed(before: Saved, after: Saved) -> bool:
    """Decide whether, between two moments, a newer checkpoint or a change of the program's files appeared."""
    return after.step > before.step or after.files != before.files


def latest_name(folder: RunFolder) -> str:
    """Return the name of the newest checkpoint; empty if the run has no checkpoint."""
    # Reading in a folder that does not exist looks up its name, and an NFS client then remembers for a while
    # that the name does not exist. `is_there` lists the parent folder instead.
    if not is_there(folder.checkpoints_dir):
        return ""
    return re.sub(r"[^A-Za-z0-9-]", "", read_text(folder.checkpoints_dir / "latest") or "")


def newest_step(name: str) -> int:
    """Return the step in the name of a checkpoint; 0 if the name holds no step."""
    digits = re.sub("^step-", "", name.strip())
    return int(digits) if re.fullmatch("[0-9]{1,18}", digits) else 0


def _hash_of(project: Path, pattern: str) -> str:
    """Return a hash of the names, sizes and times of the files of a glob; empty if no file matches."""
    # Imported here, because only programs that save files of their own need these modules.
    import glob
    import hashlib

    where = os.path.join(glob.escape(str(project)), os.path.expanduser(pattern))  # noqa: PTH111, PTH118
    paths = sorted(path for match in glob.glob(where) for path in _files(match))  # noqa: PTH207
    if not paths:
        return ""

    lines = [f"{path}\0{_size_and_time(path)}" for path in paths]
    return hashlib.sha1("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _files(path: str) -> Iterator[str]:
    """Yield `path`, or the files below it if it is a folder; each folder once, even if links lead to it."""
    if os.path.isfile(path):  # noqa: PTH113
        yield path

    seen = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        seen.add(os.path.realpath(folder))
        folders[:] = [name for name in folders if os.path.realpath(os.path.join(folder, name)) not in seen]  # noqa: PTH118
        paths = [os.path.join(folder, name) for name in names]  # noqa: PTH118
        yield from filter(os.path.isfile, paths)


def _size_and_time(path: str) -> tuple[int, int]:
    """Return the size of a file in bytes and its last change in nanoseconds; zeros if the file is gone."""
    # The program may have removed the file since the glob found it.
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
