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
    """The newest saves of a run at one moment."""

    step: int = 0
    """The step of the checkpoint from which the run would resume; 0 before the first."""
    files: str = ""
    """A sum over names, sizes and times of the files that the program saves; empty without any."""


def saved(folder: RunFolder, project: Path, pattern: str) -> Saved:
    """Return the newest saves of a run.

    Args:
        folder: the run folder.
        project: the project folder.
        pattern: a glob of the files or folders that the program saves, relative to `project`; may be empty.
    """
    return Saved(newest_step(latest_name(folder)), _sum_of(project, pattern) if pattern else "")


def progressed(before: Saved, after: Saved) -> bool:
    """Return whether there is a newer checkpoint, or a change in the program's own files."""
    return after.step > before.step or after.files != before.files


def latest_name(folder: RunFolder) -> str:
    """Return the name of the newest checkpoint; empty before the first."""
    if not is_there(folder.checkpoints_dir):  # A look at its content would be a look-up of its name.
        return ""
    return re.sub(r"[^A-Za-z0-9-]", "", read_text(folder.checkpoints_dir / "latest") or "")


def newest_step(name: str) -> int:
    """Return the step in the name of a checkpoint; 0 if the name holds no step."""
    digits = re.sub("^step-", "", name.strip())
    return int(digits) if re.fullmatch("[0-9]{1,18}", digits) else 0


def _sum_of(project: Path, pattern: str) -> str:
    import glob  # Only programs that save files of their own need these.
    import hashlib

    where = os.path.join(glob.escape(str(project)), os.path.expanduser(pattern))  # noqa: PTH111, PTH118
    found = sorted(file for one in glob.glob(where) for file in _files(one))  # noqa: PTH207
    lines = [f"{file}\0{_size_and_time(file)}" for file in found]
    return hashlib.sha1("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest() if lines else ""


def _files(path: str) -> Iterator[str]:
    """Yield `path`, or the files below it if it is a folder; links to folders are followed once."""
    if os.path.isfile(path):  # noqa: PTH113
        yield path
    seen = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        seen.add(os.path.realpath(folder))
        folders[:] = [one for one in folders if os.path.realpath(os.path.join(folder, one)) not in seen]  # noqa: PTH118
        yield from (file for file in (os.path.join(folder, name) for name in names) if os.path.isfile(file))  # noqa: PTH113, PTH118


def _size_and_time(file: str) -> tuple[int, int]:
    try:
        stat = os.stat(file)  # noqa: PTH116
    except OSError:  # The program may replace it just now.
        return 0, 0
    return stat.st_size, stat.st_mtime_ns
