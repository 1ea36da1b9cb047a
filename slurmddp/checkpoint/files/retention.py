"""Delete superseded checkpoints and leftovers of killed writers; rename unusable checkpoints."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from slurmddp.checkpoint.files.best_by_metric import Best, ranked
from slurmddp.checkpoint.files.manifest import (
    DELETING,
    MANIFEST_FILE,
    POINTER_FILE,
    REPLACED,
    WRITING,
    are_of_one_program,
    checkpoint_folders,
    load_manifest,
    step_of,
    verify,
)
from slurmddp.errors import CheckpointError
from slurmddp.host import process
from slurmddp.host.file_lock import try_lock
from slurmddp.host.free_name import first_free
from slurmddp.runs.folder.late_files import is_there

MIN_KEPT = 2
"""Number of newest verified checkpoints that are never deleted."""

_TEMPORARY_POINTER = re.compile(rf"\.{POINTER_FILE}\.[0-9a-f]{{16}}")
"""Name of the temporary file that is written first and then renamed to the file `latest`."""

log = logging.getLogger(__name__)

_Signature = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and modification time in nanoseconds of each file."""
_known_good: dict[Path, _Signature] = {}
"""The signatures of the checkpoints that this process has written or verified."""


def trust(folder: Path) -> None:
    """Record that `folder` is a good checkpoint, so that `still_good` does not hash its files again."""
    _known_good[folder] = _signature(folder)


def still_good(folder: Path) -> bool:
    """Return whether a checkpoint is undamaged.

    It is not hashed if `trust` was called and its file sizes and modification times have not changed since.
    """
    try:
        # Each save calls this for all kept checkpoints, and `verify` reads every byte. So compare signatures
        # first.
        if _known_good.get(folder) == _signature(folder):
            return True
        verify(folder)
        trust(folder)
    except (CheckpointError, OSError):
        return False

    return True


def prune(root: Path, keep_last: int, newest: Path, keep_best: Best | None = None) -> None:
    """Delete the checkpoints that are older than the newest `keep_last` verified checkpoints.

    At least MIN_KEPT (2) verified checkpoints stay, `newest` among them. Checkpoints of later steps than
    `newest`, checkpoints of other programs, and the best verified checkpoint by `keep_best` stay as well, and
    do not count.
    """
    keep = max(keep_last, MIN_KEPT)
    newest_step = step_of(newest) or 0
    is_of_program = partial(are_of_one_program, newest)
    by_metric = [] if keep_best is None else ranked(root, keep_best)
    best = next((folder for folder in by_metric if is_of_program(folder) and still_good(folder)), None)

    kept = 0
    for folder in checkpoint_folders(root):
        if (step_of(folder) or 0) > newest_step or not is_of_program(folder):
            continue

        # A damaged checkpoint does not count, so that `keep` usable checkpoints stay.
        if kept < keep:
            if folder == newest or still_good(folder):
                kept += 1
        elif folder != best:
            _delete(folder)


def clear_leftovers(root: Path) -> None:
    """Delete the hidden folders and temporary files that killed writers left in `root`.

    Files and folders that a running writer of this host has locked are kept.
    """
    # Restore first: if a writer was killed between the two renames of a replacement, the replaced folder is
    # the only checkpoint of its step.
    restore_replaced(root)
    for path in root.iterdir():
        is_folder = path.name.startswith((WRITING, DELETING, REPLACED))
        if (is_folder or _TEMPORARY_POINTER.fullmatch(path.name)) and not _is_locked(path):
            _remove(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder`, so that other writers of this host do not delete it as a leftover."""
    # The lock is needed because the writer process of a killed rank may still write when the restarted rank
    # saves. The kernel releases it when the process ends, even by SIGKILL.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    """Return whether a running writer of this host has locked the folder or file, or may be writing it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        is_free = try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)

    # `try_lock` returns None on a file system without locks.
    if is_free is None:
        return _may_be_written(path)
    return not is_free


def _may_be_written(path: Path) -> bool:
    """Decide by the name of `path` whether a process of this host may be writing it, without locks."""
    if path.name.startswith(WRITING):
        pid = path.name.rpartition("-")[2]
        return pid.isdigit() and process.exists(int(pid))

    # The name of a temporary pointer contains no pid, so its writer may be running. Keep the few bytes.
    return bool(_TEMPORARY_POINTER.fullmatch(path.name))


def restore_replaced(root: Path) -> None:
    """Restore a checkpoint whose writer was killed between the two renames of a replacement."""
    for path in root.glob(f"{REPLACED}step-*"):
        target = root / path.name.removeprefix(REPLACED)
        if not is_there(target):
            path.rename(target)


def set_aside(folder: Path, prefix: str) -> Path | None:
    """Rename a checkpoint to `<prefix><name>`; return the new path, or None if the rename fails."""
    plain = f"{prefix}{folder.name}"
    name = first_free(f"{plain}-", lambda name: is_there(folder.with_name(name)), plain=plain)
    try:
        return folder.rename(folder.with_name(name))
    except OSError:
        return None


def _delete(folder: Path) -> None:
    """Delete a superseded checkpoint; an error is only logged."""
    # Rename the folder first, so that a half-deleted folder never has the name of a checkpoint.
    renamed = folder.with_name(DELETING + folder.name)
    try:
        _remove(renamed)
        folder.rename(renamed)
    except OSError as error:
        log.warning("Could not delete the superseded checkpoint %s: %s", folder, error)
        return

    _known_good.pop(folder, None)
    _remove(renamed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _signature(folder: Path) -> _Signature:
    """Return names, sizes and modification times of the folder's files."""
    names = [MANIFEST_FILE, *load_manifest(folder).files]
    stats = [(name, (folder / name).stat()) for name in names]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
