"""Write a state as a checkpoint, and check beforehand that such a write will succeed.

Most saves are copied into memory and written by another process (`checkpoint/memory/writer_process.py`). This
module writes from the tensors themselves. So it needs no memory for a copy, and no second process. It serves
states for which /dev/shm has no room, and scripts that wait for their saves. Both ways use the same tree,
layout of tensors, parts and `publish`; only the source of the bytes differs.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurmddp.checkpoint.files import space
from slurmddp.checkpoint.files.best_by_metric import Best
from slurmddp.checkpoint.files.digest import FileRecord
from slurmddp.checkpoint.files.durable import sync_folder, write_hashed
from slurmddp.checkpoint.files.manifest import (
    DELETING,
    TENSORS_FILE,
    TREE_FILE,
    Manifest,
    shard_file,
    verify,
)
from slurmddp.checkpoint.files.parts import Parts
from slurmddp.checkpoint.files.publish import (
    Fill,
    checkpoint_error,
    complete,
    fresh_folder,
    publish,
    versions,
)
from slurmddp.checkpoint.files.retention import MIN_KEPT
from slurmddp.checkpoint.files.retry import retried
from slurmddp.checkpoint.state.safetensors_stream import encode, encoded_size, is_in_memory
from slurmddp.checkpoint.state.state_tree import flatten
from slurmddp.runs.folder.owner import refuse_foreign

log = logging.getLogger(__name__)


def write(
    root: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    meta: Mapping[str, Any],
    keep_last: int,
    keep_best: Best | None = None,
    parts: Parts | None = None,
) -> Path:
    """Save `state` as the checkpoint of `step` under `root`; only one process may call this.

    If the state has DTensors, this process is rank 0, and the other ranks call `write_shards`.

    Args:
        root: the folder of all checkpoints.
        step: number of training steps completed, 0 or more.
        state: nested dict (string or integer keys), list and tuple of dense tensors, numbers, strings,
            booleans and None.
        meta: metadata for the manifest, as JSON values.
        keep_last, keep_best: as in `publish`.
        parts: the hidden folder to which the other ranks write their shards. None: the state has no DTensors.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the checkpoint was not written; older checkpoints are unchanged.
    """
    fill, needed = _filler(state, parts)
    folder = publish(root, step, fill, meta=meta, keep_last=keep_last, keep_best=keep_best, needed=needed)
    if parts is not None:
        parts.sweep()
    return folder


def write_shards(parts: Parts, rank: int, state: Mapping[str, Any]) -> None:
    """Write the shards of this rank, as a part of the checkpoint that rank 0 publishes with `write`.

    Raises:
        CheckpointError: the part was not written.
    """
    shards = flatten(state, sharded=True).shards
    parts.write(rank, lambda folder: {shard_file(rank): _write_tensors(folder / shard_file(rank), shards)})


def _filler(state: Mapping[str, Any], parts: Parts | None) -> tuple[Fill, int]:
    """Return a function that writes the files of `state` into a folder, for `publish`, and their total size.

    The size in bytes does not include the files of other ranks.
    """
    flat = flatten(state, sharded=parts is not None)
    tree = flat.to_json()
    files = {TENSORS_FILE: flat.tensors}
    if parts is not None:
        files[shard_file(0)] = flat.shards

    def fill(folder: Path) -> dict[str, FileRecord]:
        records = {name: _write_tensors(folder / name, tensors) for name, tensors in files.items()}
        records[TREE_FILE] = write_hashed(folder / TREE_FILE, [memoryview(tree)])
        if parts is not None:
            records |= parts.collect(parts.files - records.keys(), folder)
        return records

    return fill, sum(map(encoded_size, files.values())) + len(tree)


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    in_memory = all(map(is_in_memory, tensors.values()))
    return write_hashed(path, encode(tensors), expected=encoded_size(tensors), in_memory=in_memory)


def check_can_write(
    root: Path,
    state: Mapping[str, Any],
    *,
    growth: int = 0,
    keep_last: int,
    parts: Parts | None = None,
) -> None:
    """Write a test checkpoint of `state` under `root` as `write` does, verify it, and delete it.

    A warning is logged if the disk is too small for `keep_last` checkpoints and one that is being written.

    Args:
        root, state, keep_last, parts: as in `write`.
        growth: number of bytes by which later checkpoints will be larger than this one.

    Raises:
        CheckpointError: `write` would fail.
    """
    root = root.absolute()
    fill, needed = _filler(state, parts)
    refuse_foreign(root)
    try:
        retried(partial(_write_and_delete, root, fill, needed, growth), "The test save")
        free = space.free_bytes(root)
    except OSError as error:
        raise checkpoint_error(error, f"A test save to {root} failed") from error
    if parts is not None:
        shutil.rmtree(parts.folder, ignore_errors=True)

    # The + 1 is the new checkpoint: while it is written, all kept checkpoints still exist.
    wanted = (max(keep_last, MIN_KEPT) + 1) * (needed + growth)
    if free < wanted:
        log.warning(
            "%s has %s of free space, but keeping %d checkpoints of %s takes up to %s.",
            root, space.size_text(free), keep_last, space.size_text(needed + growth), space.size_text(wanted),
        )  # fmt: skip


def _write_and_delete(root: Path, fill: Fill, needed: int, growth: int) -> None:
    moved = root / f"{DELETING}test-{os.getpid()}"
    try:
        with fresh_folder(root, "test", needed + growth) as temporary:
            with (temporary / "growth").open("xb") as stream:
                space.reserve(stream.fileno(), growth, temporary)
                complete(temporary, Manifest(0, fill(temporary), {}, versions()))
            verify(temporary)
            temporary.rename(moved)
            sync_folder(root)
    finally:
        shutil.rmtree(moved, ignore_errors=True)
