"""Publish a checkpoint: its files become visible all at once, so that readers always see a whole checkpoint.

Both ranks and the writer process publish. The module needs no torch, because the writer runs without it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from slurmddp.checkpoint.files import space
from slurmddp.checkpoint.files.best_by_metric import Best
from slurmddp.checkpoint.files.digest import FileRecord
from slurmddp.checkpoint.files.durable import sync_folder, write_hashed, write_small
from slurmddp.checkpoint.files.manifest import (
    ABANDONED,
    MANIFEST_FILE,
    POINTER_FILE,
    REPLACED,
    WRITING,
    Manifest,
    are_of_one_program,
    folder_name,
    load_manifest,
)
from slurmddp.checkpoint.files.retention import (
    clear_leftovers,
    locked,
    prune,
    restore_replaced,
    set_aside,
    still_good,
    trust,
)
from slurmddp.checkpoint.files.retry import retried
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.runs.folder.late_files import is_there
from slurmddp.runs.folder.owner import refuse_foreign
from slurmddp.runs.folder.run_context import RunContext

log = logging.getLogger(__name__)

Fill = Callable[[Path], Mapping[str, FileRecord]]
"""A function that writes and flushes a checkpoint's files in an empty folder, and returns their records."""


def publish(
    root: Path,
    step: int,
    fill: Fill,
    *,
    meta: Mapping[str, Any],
    keep_last: int,
    keep_best: Best | None = None,
    needed: int = 0,
    made_by: Mapping[str, str] | None = None,
    durable: Callable[[], object] = lambda: None,
) -> Path:
    """Publish the checkpoint of `step`, all at once or not at all, and delete superseded checkpoints.

    Args:
        root: the folder of all checkpoints.
        step: number of training steps completed, 0 or more.
        fill: writes the files into an empty folder. After a transient error of the file system it is called
            again with a new folder.
        meta: the caller's metadata for the manifest, as JSON values.
        keep_last: number of newest checkpoints to keep. At least two are kept.
        keep_best: name of a metric in `meta["metrics"]`, and "min" or "max". The best checkpoint by this
            metric is kept too. None: only the newest are kept.
        needed: number of bytes that `fill` writes, which must be free on the disk. 0: unknown.
        made_by: software versions for the manifest. None: the versions in this process.
        durable: called when the checkpoint is durable, before older checkpoints are deleted.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the checkpoint was not written; older checkpoints are unchanged.
        SupersededError: a later attempt of the run has started.
    """
    check(step, keep_last, meta)
    root = root.absolute()
    target = root / folder_name(step)
    refuse_foreign(root)

    if made_by is None:
        made_by = versions()
    publish_once = partial(_publish_once, target, fill, meta, needed, made_by)
    try:
        retried(publish_once, f"Writing the checkpoint of step {step}")
    except OSError as error:
        # A later attempt deletes the unfinished folders of this attempt. That may be the cause of the error.
        RunContext.read(os.environ).refuse_superseded()
        text = f"The checkpoint of step {step} could not be written to {root}"
        raise checkpoint_error(error, text) from error

    _update_pointer(target)
    durable()
    try:
        prune(root, keep_last, target, keep_best)
    except OSError as error:
        log.warning("Checkpoint %s is written, but older checkpoints could not be deleted: %s", target, error)
    return target


def _publish_once(
    target: Path, fill: Fill, meta: Mapping[str, Any], needed: int, made_by: Mapping[str, str]
) -> None:
    """Write all files into a hidden folder, and rename it to `target`.

    A retry writes all files again, because the kernel may have dropped pages after a failed fsync.
    """
    with fresh_folder(target.parent, target.name, needed) as temporary:
        step = int(target.name.removeprefix("step-"))
        complete(temporary, Manifest(step, _filled(temporary, fill), meta, made_by))

        # There is no lock between hosts: the rename happens even if a later attempt starts after this check.
        # It does no harm, because the checkpoint is whole and of the same training.
        RunContext.read(os.environ).refuse_superseded()
        _move_in(temporary, target)

    trust(target)


def _filled(folder: Path, fill: Fill) -> Mapping[str, FileRecord]:
    """Call `fill` with the folder, check the written files against the returned records, return the records.

    Raises:
        CheckpointError: the folder does not contain exactly the files in the records.
    """
    records = fill(folder)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}

    for name in sorted(names ^ records.keys()):
        text = f"fill() returned a record of {name}, but wrote no such file."
        if name in names:
            text = f"fill() wrote {name}, but returned no record of it."
        raise CheckpointError(
            text, hint="Return `checkpoint.files.digest.record_of(path)` for each file that fill() writes."
        )

    return records


@contextmanager
def fresh_folder(root: Path, name: str, needed: int) -> Iterator[Path]:
    """Check the free space and yield a new hidden folder in `root`; delete it at the end if it still exists.

    The folder is locked meanwhile, so that no other writer deletes it as a leftover. Leftovers of killed
    writers are deleted first.

    Raises:
        NoRoomError: fewer than `needed` bytes are free.
        SupersededError: a later attempt of the run has started.
    """
    root.mkdir(parents=True, exist_ok=True)
    # If a later attempt runs, an apparent leftover may be the checkpoint that it is writing.
    RunContext.read(os.environ).refuse_superseded()
    clear_leftovers(root)
    space.require(root, needed)

    temporary = root / f"{WRITING}{name}-{os.getpid()}"
    # This process, or another process with the same pid, may have left a folder of that name.
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with locked(temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def versions() -> dict[str, str]:
    """Return the versions of Python and torch in this process."""
    torch = sys.modules.get("torch")
    made_by = {"python": platform.python_version()}
    if torch is not None:
        made_by["torch"] = str(torch.__version__)
    return made_by


def check(step: int, keep_last: int, meta: Mapping[str, Any]) -> None:
    """Check the arguments of `publish` that can be checked before the write.

    Raises:
        CheckpointError: `step` is negative, or JSON can't represent `meta` exactly.
        ConfigError: `keep_last` is not a positive integer.
    """
    if step < 0:
        raise CheckpointError(f"A checkpoint can't have the step {step}.", hint="Give a step of 0 or more.")
    if not isinstance(keep_last, int) or keep_last < 1:
        raise ConfigError(
            f"keep_last is {keep_last!r}, not a whole number of at least 1.",
            hint="Give 2 or more; 1 also keeps 2 checkpoints.",
        )

    try:
        text = json.dumps(dict(meta), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The metadata of the checkpoint can't be stored as JSON: {error}.") from error
    if json.loads(text) != meta:
        raise CheckpointError(
            "The metadata of the checkpoint would change when it is stored as JSON.",
            hint="Use strings as keys, and lists instead of tuples.",
        )


def complete(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder`, after all other files of the checkpoint, and flush the folder."""
    write_hashed(folder / MANIFEST_FILE, [memoryview(manifest.to_json().encode())])
    sync_folder(folder)


def _move_in(temporary: Path, target: Path) -> None:
    """Rename the finished folder `temporary` to `target`, and flush the rename to the disk.

    If `target` exists with the same files and is undamaged, it stays. If it differs, it is replaced. If
    another program wrote it, it is renamed to `abandoned-...` first.
    """
    root = target.parent
    replaced = root / f"{REPLACED}{target.name}"
    if is_there(target) and not are_of_one_program(temporary, target):
        set_aside(target, ABANDONED)

    if is_there(target):
        if _is_same(temporary, target):
            # This may be a retry after a rename whose flush failed. So flush again.
            sync_folder(root)
            return

        # After a kill between these two renames, `restore_replaced` restores the old folder.
        target.rename(replaced)
        sync_folder(root)

    try:
        temporary.rename(target)
    except OSError:
        restore_replaced(root)
        raise
    sync_folder(root)
    shutil.rmtree(replaced, ignore_errors=True)


def _update_pointer(target: Path) -> None:
    """Write the name of `target` to the file `latest`.

    An OSError is only logged, because the checkpoint is durable already.
    """
    RunContext.read(os.environ).refuse_superseded()
    pointer = target.parent / POINTER_FILE
    try:
        retried(partial(write_small, pointer, target.name + "\n"), f"Updating {pointer}")
    except OSError as error:
        log.warning("Checkpoint %s is written, but %s could not be updated: %s", target, pointer, error)


def _is_same(new: Path, old: Path) -> bool:
    return still_good(old) and load_manifest(old).files == load_manifest(new).files


def checkpoint_error(error: OSError, what: str) -> CheckpointError:
    """Convert the OSError of a failed write into a CheckpointError with a hint.

    Args:
        error: the cause.
        what: the beginning of the message, without a full stop: "The checkpoint of step 7 could not be
            written to /data/run/checkpoints".
    """
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free space, raise the quota, lower train.keep_last, or choose another runs_dir."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Make the folder writable for this user, or choose another runs_dir."
    elif error.errno == errno.EFBIG:
        hint = "Raise the file size limit (ulimit -f), or choose a runs_dir that allows larger files."
    else:
        hint = "Check the file system, then run again."
    return CheckpointError(f"{what}: {reason}. Older checkpoints are untouched.", hint=hint)
