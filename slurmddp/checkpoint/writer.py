"""Writes checkpoints so that at every moment, whatever is killed or full, the newest one can be read."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmddp.checkpoint.files import FileRecord, sync_folder, write_hashed, write_small
from slurmddp.checkpoint.manifest import (
    FORMAT,
    MANIFEST_FILE,
    POINTER_FILE,
    REPLACED,
    WRITING,
    Manifest,
    folder_name,
    load_manifest,
    versions,
)
from slurmddp.checkpoint.retention import clear_leftovers, prune, restore_replaced, still_good, trust
from slurmddp.checkpoint.state import flatten
from slurmddp.checkpoint.tensors import encode
from slurmddp.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

TENSORS_FILE = "state.safetensors"
TREE_FILE = "state.json"

Fill = Callable[[Path], Mapping[str, FileRecord]]
"""Writes the files of a checkpoint into an empty folder, flushed, and returns their records by name."""


def write(
    root: Path, step: int, state: Mapping[str, Any], *, meta: Mapping[str, Any], keep_last: int = 3
) -> Path:
    """Save `state` as the checkpoint of `step` under `root` and return its folder; one process calls this.

    `state` is nested dict (string or integer keys), list and tuple of dense tensors, numbers, strings,
    booleans and None; `meta` is JSON. Raises CheckpointError; older checkpoints are untouched then.
    """
    flat = flatten(state)
    tree = json.dumps({"format": FORMAT, "state": flat.tree}, separators=(",", ":"))

    def fill(folder: Path) -> dict[str, FileRecord]:
        return {
            TENSORS_FILE: write_hashed(folder / TENSORS_FILE, encode(flat.tensors)),
            TREE_FILE: write_hashed(folder / TREE_FILE, [memoryview(tree.encode())]),
        }

    return publish(root, step, fill, meta=meta, keep_last=keep_last)


def publish(root: Path, step: int, fill: Fill, *, meta: Mapping[str, Any], keep_last: int = 3) -> Path:
    """Make what `fill` writes the checkpoint of `step`, all at once or not at all, and prune older ones."""
    _check(step, keep_last, meta)
    root = root.absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        clear_leftovers(root)
        temporary = root / f"{WRITING}{folder_name(step)}-{os.getpid()}"
        target = root / folder_name(step)
        try:
            temporary.mkdir()
            _complete(temporary, Manifest(step, fill(temporary), meta, versions()))
            _move_in(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        trust(target)
    except OSError as error:
        raise _explained(error, root, step) from error
    _follow_up(target, keep_last)
    return target


def _check(step: int, keep_last: int, meta: Mapping[str, Any]) -> None:
    if step < 0:
        raise CheckpointError(f"A checkpoint can't be of step {step}.", hint="Steps count from 0.")
    if keep_last < 1:
        raise ConfigError(f"keep_last is {keep_last}.", hint="Keep at least 1 checkpoint (2 always stay).")
    try:
        text = json.dumps(dict(meta), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The facts given with the checkpoint are not JSON: {error}.") from error
    if json.loads(text) != meta:
        raise CheckpointError(
            "The facts given with the checkpoint would change on the way through JSON.",
            hint="Use string keys and lists instead of tuples.",
        )


def _complete(folder: Path, manifest: Manifest) -> None:
    """Add the manifest as the last file and make the folder's list of names durable."""
    write_hashed(folder / MANIFEST_FILE, [memoryview(manifest.to_json().encode())])
    sync_folder(folder)


def _move_in(temporary: Path, target: Path) -> None:
    """Give a finished folder its name, replacing a checkpoint of the same step only when they differ."""
    root = target.parent
    aside = root / f"{REPLACED}{target.name}"
    if target.exists():
        if _same(temporary, target):
            return
        # Killed between these two renames, the old folder is found under its other name and put back.
        target.rename(aside)
        sync_folder(root)
    try:
        temporary.rename(target)
    except OSError:
        restore_replaced(root)
        raise
    sync_folder(root)
    shutil.rmtree(aside, ignore_errors=True)


def _follow_up(target: Path, keep_last: int) -> None:
    """Move the pointer and prune; the checkpoint is safe already, so trouble here is only told."""
    try:
        write_small(target.parent / POINTER_FILE, target.name + "\n")
        prune(target.parent, keep_last, target)
    except OSError as error:
        log.warning("Checkpoint %s is written, but the folder could not be tidied: %s", target, error)


def _same(new: Path, old: Path) -> bool:
    return still_good(old) and load_manifest(old).files == load_manifest(new).files


def _explained(error: OSError, root: Path, step: int) -> CheckpointError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free space or raise the quota, or lower train.keep_last."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Make the folder writable for this user, or choose another runs_dir."
    elif error.errno == errno.EFBIG:
        hint = "The file size limit (ulimit -f) or the file system does not allow so large a file."
    else:
        hint = "Check the file system, then run again."
    return CheckpointError(
        f"The checkpoint of step {step} could not be written to {root}: {reason}. "
        "Older checkpoints are untouched.",
        hint=hint,
    )
