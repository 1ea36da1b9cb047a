"""Writes checkpoints so that at every moment, whatever is killed or full, the newest one can be read."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurmddp.checkpoint.retention import (
    NEVER_BELOW,
    clear_leftovers,
    prune,
    restore_replaced,
    still_good,
    trust,
)
from slurmddp.checkpoint.retry import retried
from slurmddp.checkpoint.state import flatten
from slurmddp.checkpoint.tensors import encode, encoded_size, is_in_memory
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.runs import room
from slurmddp.runs.checkpoints import (
    DELETING,
    FORMAT,
    MANIFEST_FILE,
    POINTER_FILE,
    REPLACED,
    TENSORS_FILE,
    TREE_FILE,
    WRITING,
    Manifest,
    folder_name,
    load_manifest,
    verify,
)
from slurmddp.runs.durable import FileRecord, sync_folder, write_hashed, write_small
from slurmddp.runs.fence import refuse_superseded
from slurmddp.runs.owner import refuse_foreign

log = logging.getLogger(__name__)

Fill = Callable[[Path], Mapping[str, FileRecord]]
"""Writes the files of a checkpoint into an empty folder, flushed, and returns their records by name."""


def write(
    root: Path, step: int, state: Mapping[str, Any], *, meta: Mapping[str, Any], keep_last: int = 3
) -> Path:
    """Save `state` as the checkpoint of `step` under `root` and return its folder; one process calls this.

    `state` is nested dict (string or integer keys), list and tuple of dense tensors, numbers, strings,
    booleans and None; `meta` is JSON. Raises CheckpointError; older checkpoints are untouched then.
    """
    fill, needed = _filler(state)
    return publish(root, step, fill, meta=meta, keep_last=keep_last, needed=needed)


def _filler(state: Mapping[str, Any]) -> tuple[Fill, int]:
    """Return what writes the files of `state`, and how many bytes they will have."""
    flat = flatten(state)
    tree = json.dumps({"format": FORMAT, "state": flat.tree}, separators=(",", ":")).encode()
    tensor_bytes = encoded_size(flat.tensors)
    held = is_in_memory(flat.tensors.values())

    def fill(folder: Path) -> dict[str, FileRecord]:
        parts = encode(flat.tensors)
        tensors = write_hashed(folder / TENSORS_FILE, parts, expected=tensor_bytes, held=held)
        return {TENSORS_FILE: tensors, TREE_FILE: write_hashed(folder / TREE_FILE, [memoryview(tree)])}

    return fill, tensor_bytes + len(tree)


def publish(
    root: Path, step: int, fill: Fill, *, meta: Mapping[str, Any], keep_last: int = 3, needed: int = 0
) -> Path:
    """Make what `fill` writes the checkpoint of `step`, all at once or not at all, and prune older ones.

    `needed` is the number of bytes that it will write, if known: then a disk that is too full is noticed
    first. `fill` is called again, with a new folder, after an error of the file system that passes by itself.
    """
    _check(step, keep_last, meta)
    root = root.absolute()
    target = root / folder_name(step)
    refuse_foreign(root)
    try:
        retried(partial(_publish_once, target, fill, meta, needed), f"Writing the checkpoint of step {step}")
    except OSError as error:
        refuse_superseded(os.environ)  # The later attempt clears away what it finds half written.
        raise _explained(error, f"The checkpoint of step {step} could not be written to {root}") from error
    _follow_up(target, keep_last)
    return target


def rehearse(root: Path, state: Mapping[str, Any], *, growth: int = 0, keep_last: int = 3) -> None:
    """Write `state` under `root` as `write` would, read it back, and remove it again.

    `growth` is how many bytes larger later checkpoints will be. Raises CheckpointError when `write` would.
    """
    root = root.absolute()
    fill, needed = _filler(state)
    refuse_foreign(root)
    try:
        retried(partial(_rehearse_once, root, fill, needed, growth), "The test save")
        free = room.free_bytes(root)
    except OSError as error:
        raise _explained(error, f"A test save to {root} failed") from error
    # While a checkpoint is written, all that are kept still stand.
    wanted = (max(keep_last, NEVER_BELOW) + 1) * (needed + growth)
    if free < wanted:
        log.warning(
            "%s has %s free; keeping %d checkpoints of %s takes up to %s.",
            root, room.size_text(free), keep_last, room.size_text(needed + growth), room.size_text(wanted),
        )  # fmt: skip


def _rehearse_once(root: Path, fill: Fill, needed: int, growth: int) -> None:
    temporary = _fresh_folder(root, "test", needed + growth)
    try:
        with (temporary / "growth").open("xb") as stream:
            room.reserve(stream.fileno(), growth, temporary)
            _complete(temporary, Manifest(0, fill(temporary), {}, _versions()))
        verify(temporary)
        temporary = temporary.rename(root / f"{DELETING}test-{os.getpid()}")
        sync_folder(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish_once(target: Path, fill: Fill, meta: Mapping[str, Any], needed: int) -> None:
    """Write and move in, from the start: after a failed fsync the kernel may have dropped what it held."""
    root = target.parent
    temporary = _fresh_folder(root, target.name, needed)
    try:
        step = int(target.name.removeprefix("step-"))
        _complete(temporary, Manifest(step, _filled(temporary, fill), meta, _versions()))
        # No lock spans the hosts: what gets past this look is a whole checkpoint of the same training.
        refuse_superseded(os.environ)
        _move_in(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    trust(target)


def _filled(folder: Path, fill: Fill) -> Mapping[str, FileRecord]:
    """Return the records of what `fill` writes; a file without one would never be verified."""
    records = fill(folder)
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    for name in sorted(written ^ records.keys()):
        found = "A checkpoint's folder holds" if name in written else "There is no file"
        raise CheckpointError(
            f"{found} {name}, which is {'not ' if name in written else ''}among the records.",
            hint="Return one record for each file that was written: slurmddp.runs.durable.record_of(path).",
        )
    return records


def _fresh_folder(root: Path, name: str, needed: int) -> Path:
    """Make sure of the space and return a new hidden folder beside the checkpoints."""
    root.mkdir(parents=True, exist_ok=True)
    refuse_superseded(os.environ)  # The leftovers may be what the later attempt is writing.
    clear_leftovers(root)
    room.require(root, needed)
    temporary = root / f"{WRITING}{name}-{os.getpid()}"
    temporary.mkdir()
    return temporary


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


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
            sync_folder(root)  # It may be from a try whose last step, this one, failed.
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
    refuse_superseded(os.environ)
    try:
        pointer = target.parent / POINTER_FILE
        retried(partial(write_small, pointer, target.name + "\n"), f"Moving {pointer}")
        prune(target.parent, keep_last, target)
    except OSError as error:
        log.warning("Checkpoint %s is written, but the folder could not be tidied: %s", target, error)


def _same(new: Path, old: Path) -> bool:
    return still_good(old) and load_manifest(old).files == load_manifest(new).files


def _explained(error: OSError, what: str) -> CheckpointError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free space, raise the quota, lower train.keep_last, or choose another runs_dir."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Make the folder writable for this user, or choose another runs_dir."
    elif error.errno == errno.EFBIG:
        hint = "The file size limit (ulimit -f) or the file system does not allow so large a file."
    else:
        hint = "Check the file system, then run again."
    return CheckpointError(f"{what}: {reason}. Older checkpoints are untouched.", hint=hint)
