"""Deletes what newer verified checkpoints supersede, and clears what a killed writer left behind."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slurmddp.checkpoint.files.manifest import (
    BAD,
    DELETING,
    POINTER_FILE,
    REPLACED,
    WRITING,
    checkpoint_folders,
    load_manifest,
    step_of,
    verify,
)
from slurmddp.errors import CheckpointError

NEVER_BELOW = 2
"""So many verified checkpoints always stay, where so many exist."""

_TEMPORARY = re.compile(rf"\.{POINTER_FILE}\.[0-9a-f]{{16}}")
_ASIDE = re.compile(rf"{BAD}step-(\d+)(-\d+)?")

log = logging.getLogger(__name__)

_Signature = tuple[tuple[str, int, int], ...]
_known_good: dict[Path, _Signature] = {}


def trust(folder: Path) -> None:
    """Remember a checkpoint that this process has just written or verified, so as not to hash it again."""
    _known_good[folder] = _signature(folder)


def still_good(folder: Path) -> bool:
    """Say whether a checkpoint verifies; it is not hashed again while its files are as at `trust`."""
    try:
        if _known_good.get(folder) == _signature(folder):
            return True
        verify(folder)
        trust(folder)
    except (CheckpointError, OSError):
        return False
    return True


def prune(root: Path, keep_last: int, newest: Path) -> None:
    """Keep `newest` and the verified ones before it up to `keep_last` (at least two); delete what is older.

    Folders of later steps than `newest` are left alone: they are not superseded by it.
    """
    keep = max(keep_last, NEVER_BELOW)
    newest_step = step_of(newest) or 0
    kept = 0
    for folder in checkpoint_folders(root):
        if (step_of(folder) or 0) > newest_step:
            continue
        if kept >= keep:
            _delete(folder)
        elif folder == newest or still_good(folder):
            kept += 1


def clear_leftovers(root: Path) -> None:
    """Remove files of killed writers; keep those that a live writer holds."""
    restore_replaced(root)
    for path in root.iterdir():
        is_temporary = path.name.startswith((WRITING, DELETING, REPLACED)) or _TEMPORARY.fullmatch(path.name)
        if is_temporary and not _is_held(path):
            _remove(path)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep this host's other writers from taking `folder` for a leftover, for as long as this process lives.

    A rank that was killed leaves a process that still writes its state, and the next rank may begin to save.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # Some network file systems have no locks.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        os.close(descriptor)
    return False


def restore_replaced(root: Path) -> None:
    """Put back a checkpoint whose writer was killed between moving it aside and moving the new one in."""
    for path in root.glob(f"{REPLACED}step-*"):
        target = root / path.name.removeprefix(REPLACED)
        if not target.exists():
            path.rename(target)


def set_aside(folder: Path) -> Path | None:
    """Rename a bad checkpoint to `bad-<name>` and return the new path; None when that is not allowed."""
    for number in range(1, 1000):
        target = folder.with_name(f"{BAD}{folder.name}" + (f"-{number}" if number > 1 else ""))
        if target.exists():
            continue
        try:
            return folder.rename(target)
        except OSError:
            return None
    return None


def newest_aside(root: Path) -> int:
    """Return the highest step of the checkpoints that were set aside (`bad-...`), or -1 without one."""
    found = (_ASIDE.fullmatch(path.name) for path in root.glob(f"{BAD}*"))
    return max((int(match[1]) for match in found if match), default=-1)


def _delete(folder: Path) -> None:
    """Delete in two moves, so that a half-deleted folder never goes by a checkpoint's name."""
    doomed = folder.with_name(DELETING + folder.name)
    try:
        _remove(doomed)
        folder.rename(doomed)
    except OSError as error:
        log.warning("Could not delete the superseded checkpoint %s: %s", folder, error)
        return
    _known_good.pop(folder, None)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _signature(folder: Path) -> _Signature:
    """Return what changes when somebody writes to the folder's files: sizes and times."""
    names = ["manifest.json", *load_manifest(folder).files]
    stats = [(name, (folder / name).stat()) for name in names]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
