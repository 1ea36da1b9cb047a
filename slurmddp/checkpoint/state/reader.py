"""Finds the newest checkpoint that is whole and reads it, never trusting a byte that does not verify."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurmddp.checkpoint.files.durable import HashedReader, open_hashed, write_small
from slurmddp.checkpoint.files.manifest import (
    POINTER_FILE,
    TENSORS_FILE,
    TREE_FILE,
    Manifest,
    OtherVersionError,
    check_format,
    check_record,
    check_size,
    checkpoint_folders,
    folder_name,
    load_manifest,
    newest_step,
    require_state,
    step_of,
    verify,
)
from slurmddp.checkpoint.files.retention import newest_aside, restore_replaced, set_aside
from slurmddp.checkpoint.files.retry import retried
from slurmddp.checkpoint.state.safetensors_stream import decode
from slurmddp.checkpoint.state.state_tree import unflatten
from slurmddp.errors import CheckpointError
from slurmddp.runs.folder.owner import foreign_owner, warn_if_exposed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A state that was read and verified; its tensors are on the CPU and belong to the caller."""

    step: int
    state: dict[str, Any]
    meta: dict[str, Any]


def latest(root: Path) -> Path | None:
    """Return the newest checkpoint under `root` that verifies, or None; one process calls this.

    Damaged ones that are newer are renamed to `bad-...` with a warning and never used again; in a folder
    that belongs to another account they are only passed over.
    """
    root = root.absolute()
    try:
        folders = retried(partial(_folders, root), f"Looking for checkpoints in {root}")
    except OSError as error:
        raise _unreadable(root, error) from error
    set_any_aside = False
    for folder in folders:
        try:
            retried(partial(verify, folder), f"Verifying the checkpoint {folder}")
        except OtherVersionError as problem:
            raise CheckpointError(
                f"Checkpoint {folder} is not usable: {problem.message}", hint=problem.hint
            ) from problem
        except CheckpointError as problem:
            set_any_aside |= _reject(folder, problem)
        except OSError as error:
            log.warning("Checkpoint %s can't be read (%s); the one before it is tried.", folder, error)
        else:
            if set_any_aside:
                _quietly(partial(write_small, root / POINTER_FILE, folder.name + "\n"))
            return folder
    return None


def set_newest_aside(root: Path, step: int) -> tuple[str, int] | None:
    """Rename the checkpoint of `step`, the newest, to `bad-...`; return the new name and the step before it.

    Returns None and renames nothing if no older checkpoint verifies. The same holds if a checkpoint of `step`
    or of a later step was renamed before: the cause then lies elsewhere. Only one process may call this.
    """
    root = root.absolute()
    folder = root / folder_name(step)
    if foreign_owner(root) is not None or newest_step(root) != step or newest_aside(root) >= step:
        return None
    moved = set_aside(folder)
    if moved is None:
        return None
    before = latest(root)
    if before is None:
        moved.rename(folder)
        return None
    write_small(root / POINTER_FILE, before.name + "\n")
    return moved.name, step_of(before) or 0


def read(path: Path) -> Checkpoint:
    """Read the checkpoint in the folder `path`; raises CheckpointError when anything does not verify."""
    try:
        return retried(partial(_read, path), f"Reading the checkpoint {path}")
    except CheckpointError as problem:
        raise CheckpointError(
            f"Checkpoint {path} is not usable: {problem.message}",
            hint=problem.hint or "Use an older one; `latest` finds the newest that verifies.",
        ) from problem
    except OSError as error:
        raise _unreadable(path, error) from error


def _folders(root: Path) -> list[Path]:
    """Return the checkpoint folders, newest first, after a repair and a look at who else may write here."""
    if not root.is_dir():
        return []
    warn_if_exposed(root)
    if foreign_owner(root) is None:
        _quietly(partial(restore_replaced, root))
    return checkpoint_folders(root)


def _read(path: Path) -> Checkpoint:
    manifest = load_manifest(path)
    require_state(manifest)
    tensors = _read_tensors(path, manifest)
    state = unflatten(_read_tree(path, manifest), tensors)
    return Checkpoint(manifest.step, state, dict(manifest.meta))


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} can't be read: {error.strerror or error}.", hint="Check the file system.")


def _read_tensors(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    expected = manifest.files[TENSORS_FILE]
    check_size(path / TENSORS_FILE, expected)
    with open_hashed(path / TENSORS_FILE) as reader:
        try:
            tensors = decode(reader, expected.size)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            _check_rest(reader, TENSORS_FILE, manifest)
            raise CheckpointError(f"{TENSORS_FILE} can't be decoded: {error}") from error
        _check_rest(reader, TENSORS_FILE, manifest)
    return tensors


def _read_tree(path: Path, manifest: Manifest) -> Any:
    check_size(path / TREE_FILE, manifest.files[TREE_FILE])
    with open_hashed(path / TREE_FILE) as reader:
        text = reader.rest()
        _check_rest(reader, TREE_FILE, manifest)
    content = json.loads(text)
    check_format(content["format"])
    return content["state"]


def _check_rest(reader: HashedReader, name: str, manifest: Manifest) -> None:
    """Hash what is left of the file and compare: damage is reported as damage, whatever it broke first."""
    reader.drain()
    check_record(name, reader.record(), manifest.files[name])


def _reject(folder: Path, problem: CheckpointError) -> bool:
    """Set a damaged checkpoint aside, unless it is someone else's; tell, and return whether it is moved."""
    moved = set_aside(folder) if foreign_owner(folder) is None else None
    where = f"it is now {moved.name}" if moved else "it could not be renamed"
    log.warning(
        "Checkpoint %s is damaged (%s); %s, and the one before it is used.", folder, problem.message, where
    )
    return moved is not None


def _quietly(action: Callable[[], object]) -> None:
    """Run a repair that is only a convenience: a read-only folder must not stop a resume."""
    try:
        action()
    except OSError as error:
        log.warning("Checkpoints could not be tidied: %s", error)
