"""Find the newest undamaged checkpoint, read it, and quarantine damaged checkpoints."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slurmddp.checkpoint.files.best_by_metric import Best, ranked
from slurmddp.checkpoint.files.digest import HashedReader, open_hashed
from slurmddp.checkpoint.files.durable import write_small
from slurmddp.checkpoint.files.manifest import (
    ABANDONED,
    BAD,
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
    renamed_folders,
    require_state,
    step_of,
    verify,
)
from slurmddp.checkpoint.files.retention import restore_replaced, set_aside
from slurmddp.checkpoint.files.retry import retried
from slurmddp.checkpoint.state.safetensors_stream import decode
from slurmddp.checkpoint.state.shards import joined
from slurmddp.checkpoint.state.state_tree import unflatten
from slurmddp.errors import CheckpointError
from slurmddp.runs.folder.late_files import is_there
from slurmddp.runs.folder.owner import foreign_owner, refuse_foreign, warn_if_exposed
from slurmddp.runs.folder.run_context import RunContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A state that was read and verified, with its step and the metadata of the save.

    No other object shares its tensors. They are on the CPU.
    """

    step: int
    state: dict[str, Any]
    meta: dict[str, Any]


def latest(root: Path, *, without: Collection[str] = ()) -> Path | None:
    """Return the newest undamaged checkpoint under `root`, or None; only one process may call this.

    Newer checkpoints that are damaged are renamed to `bad-...`, with a warning, and are never loaded. If
    another account owns them, they are skipped without a rename.

    Args:
        root: the folder of all checkpoints.
        without: names of checkpoints that are skipped.

    Raises:
        CheckpointError: `root` can't be read, or another version of slurmddp wrote the newest checkpoint.
    """
    root = root.absolute()
    try:
        folders = retried(partial(_folders, root), f"Listing the checkpoints in {root}")
    except OSError as error:
        raise _unreadable(root, error) from error

    quarantined_any = False
    for folder in folders:
        if folder.name in without:
            continue
        try:
            retried(partial(verify, folder), f"Verifying the checkpoint {folder}")
        except OtherVersionError as problem:
            raise CheckpointError(
                f"Checkpoint {folder} is not usable: {problem.message}", hint=problem.hint
            ) from problem
        except CheckpointError as problem:
            quarantined_any |= _reject(folder, problem)
        except OSError as error:
            log.warning("Checkpoint %s can't be read (%s). The next older one is tried.", folder, error)
        else:
            if quarantined_any:
                _quietly(partial(write_small, root / POINTER_FILE, folder.name + "\n"))
            return folder
    return None


def find(root: Path, *, step: int | None, best: Best | None) -> Path:
    """Return the folder of the checkpoint of `step`, or of the best undamaged checkpoint; rename nothing.

    Args:
        root: the folder of all checkpoints.
        step: the step of the checkpoint. None: the checkpoint is chosen by `best`.
        best: name of a metric that the saves recorded, and "min" or "max".

    Raises:
        CheckpointError: no such checkpoint exists, or it is damaged. The hint lists existing checkpoints.
    """
    root = root.absolute()
    if step is None and best is not None:
        candidates = ranked(root, best)
    else:
        candidates = [root / folder_name(step or 0)]

    problem = ""
    for folder in candidates:
        try:
            retried(partial(verify, folder), f"Verifying the checkpoint {folder}")
            return folder
        except CheckpointError as error:
            problem = f"{folder.name} is damaged ({error.message})" if is_there(folder) else ""
        except OSError as error:
            problem = f"{folder.name} can't be read ({error.strerror or error})"
        if problem:
            log.warning("Checkpoint %s: %s.", folder, problem)

    wanted = f"of step {step}" if best is None else f"with the metric {best[0]!r}"
    message = f"There is no usable checkpoint {wanted} in {root}"
    if problem:
        message += f": {problem}"
    raise CheckpointError(f"{message}.", hint=_choices(root))


def _choices(root: Path) -> str:
    """Return a sentence that lists the steps and metrics of the checkpoints under `root`."""
    steps = []
    metrics = set()
    for folder in reversed(checkpoint_folders(root)):
        steps.append(str(step_of(folder)))
        with suppress(CheckpointError, OSError):
            metrics |= load_manifest(folder).meta.get("metrics", {}).keys()
    if not steps:
        return "The folder contains no checkpoints."

    names = ", ".join(sorted(metrics)) or "none"
    return f"There are checkpoints of steps {', '.join(steps)}, with the metrics: {names}."


def quarantine_newest(root: Path, step: int) -> tuple[str, int] | None:
    """Rename the checkpoint of `step` to `bad-...` if it is the newest; only one process may call this.

    Returns:
        The new name, and the step of the newest older undamaged checkpoint. None, and nothing is renamed, in
        these cases: `step` is not the newest; no older checkpoint is undamaged; the folder can't be renamed,
        or another account owns it; a checkpoint of `step` or later was quarantined before, so this checkpoint
        is not the cause of the failure.

    Raises:
        SupersededError: a later attempt of the run has started.
    """
    root = root.absolute()
    folder = root / folder_name(step)
    if foreign_owner(root) is not None or newest_step(root) != step:
        return None
    if any(bad_step >= step for bad_step, _ in renamed_folders(root, BAD)):
        return None

    RunContext.read(os.environ).refuse_superseded()
    moved = set_aside(folder, BAD)
    if moved is None:
        return None

    previous = latest(root)
    if previous is None:
        # No older checkpoint is undamaged. Undo the rename, or the training would begin from the start.
        moved.rename(folder)
        return None
    write_small(root / POINTER_FILE, previous.name + "\n")
    return moved.name, step_of(previous) or 0


def abandon(root: Path, loaded: int, step: int) -> list[str]:
    """Rename the checkpoints after step `loaded` to `abandoned-...`; only one process may call this.

    Nothing is renamed if `step` is after all checkpoints. Otherwise a resume would use a newer checkpoint,
    of steps that the training undid when it loaded an older checkpoint.

    Args:
        root: the folder of all checkpoints.
        loaded: the step of the checkpoint that the training has loaded.
        step: the step that the training is about to save.

    Returns:
        The new names, in the order of their steps; empty if nothing was renamed.

    Raises:
        CheckpointError: a checkpoint can't be renamed.
        ConfigError: another account owns `root`.
        SupersededError: a later attempt of the run has started.
    """
    newest = newest_step(root)
    if newest is None or newest < step or newest <= loaded:
        return []

    refuse_foreign(root)
    RunContext.read(os.environ).refuse_superseded()
    moved: list[str] = []
    for folder in checkpoint_folders(root):
        if (step_of(folder) or 0) <= loaded:
            continue
        target = set_aside(folder, ABANDONED)
        if target is None:
            raise CheckpointError(
                f"{folder} is of a later step than the loaded step {loaded}, and can't be renamed.",
                hint="Move the checkpoint to another folder, or save to another folder.",
            )
        moved.insert(0, target.name)

    newest_name = next((folder.name for folder in checkpoint_folders(root)), "")
    _quietly(partial(write_small, root / POINTER_FILE, newest_name + "\n"))
    return moved


def go_back(root: Path, every: int, *, before: int) -> int | None:
    """Choose the newest checkpoint before a step, and rename all later checkpoints to `abandoned-...`.

    Only one process may call this, while no save is running.

    Args:
        root: the folder of all checkpoints.
        every: the newest checkpoint whose step is a multiple of this number is chosen, if there is one.
            0: the newest is chosen.
        before: only checkpoints of earlier steps than this are chosen.

    Returns:
        The step of the chosen checkpoint. None, and nothing is renamed, if there is none.
    """
    root = root.absolute()
    steps = [step_of(folder) for folder in checkpoint_folders(root)]
    earlier = [step for step in steps if step is not None and step < before]
    preferred = [step for step in earlier if every and step % every == 0]

    chosen = max(preferred or earlier, default=None)
    if chosen is not None:
        abandon(root, chosen, chosen)
    return chosen


def read(path: Path, mesh: DeviceMesh | None = None) -> Checkpoint:
    """Read and verify a checkpoint.

    Args:
        path: the folder of the checkpoint.
        mesh: the device mesh over whose ranks the sharded tensors are split again. They become DTensors with
            this rank's rows, and files without such rows are not read. None: they become whole tensors.

    Raises:
        CheckpointError: a file is missing or can't be read.
        DamagedError: a file that was read is damaged.
    """
    try:
        return retried(partial(_read, path, mesh), f"Reading the checkpoint {path}")
    except CheckpointError as problem:
        problem.message = f"Checkpoint {path} is not usable: {problem.message}"
        if not problem.hint:
            problem.hint = "Use an older checkpoint; `latest` returns the newest undamaged checkpoint."
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _folders(root: Path) -> list[Path]:
    """Return the checkpoint folders under `root`, newest first.

    First, an interrupted replacement of a checkpoint is completed, and a warning is logged if other accounts
    can write to `root`.
    """
    if not (is_there(root) and root.is_dir()):
        return []
    warn_if_exposed(root)
    if foreign_owner(root) is None:
        _quietly(partial(restore_replaced, root))
    return checkpoint_folders(root)


def _read(path: Path, mesh: DeviceMesh | None) -> Checkpoint:
    manifest = load_manifest(path)
    require_state(manifest)
    content = _read_tree(path, manifest)
    read_file = partial(_read_tensors, path, manifest)
    tensors = read_file(TENSORS_FILE) | joined(content.get("shards", {}), read_file, mesh)
    return Checkpoint(manifest.step, unflatten(content["state"], tensors), dict(manifest.meta))


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} can't be read: {error.strerror or error}.", hint="Check the file system.")


def _read_tensors(path: Path, manifest: Manifest, name: str) -> dict[str, torch.Tensor]:
    expected = manifest.files[name]
    check_size(path / name, expected)

    with open_hashed(path / name) as reader:
        try:
            tensors = decode(reader, expected.size)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            # If the bytes differ from the manifest, report that as the cause instead of the decoding error.
            _check_rest(reader, name, manifest)
            raise CheckpointError(f"{name} can't be decoded: {error}") from error
        _check_rest(reader, name, manifest)
    return tensors


def _read_tree(path: Path, manifest: Manifest) -> Any:
    expected = manifest.files[TREE_FILE]
    check_size(path / TREE_FILE, expected)
    text = bytearray(expected.size)
    with open_hashed(path / TREE_FILE) as reader:
        reader.readinto(memoryview(text))
        _check_rest(reader, TREE_FILE, manifest)

    content = json.loads(text)
    check_format(content["format"])
    return content


def _check_rest(reader: HashedReader, name: str, manifest: Manifest) -> None:
    """Read the rest of the file; raise DamagedError if its size or digest differs from the manifest."""
    reader.drain()
    check_record(name, reader.record(), manifest.files[name])


def _reject(folder: Path, problem: CheckpointError) -> bool:
    """Quarantine a damaged checkpoint unless another account owns it; return whether it was renamed."""
    moved = None
    if foreign_owner(folder) is None:
        moved = set_aside(folder, BAD)

    where = f"it is now {moved.name}" if moved else "it could not be renamed"
    log.warning(
        "Checkpoint %s is damaged (%s); %s. The next older one is tried.", folder, problem.message, where
    )
    return moved is not None


def _quietly(action: Callable[[], object]) -> None:
    """Run an optional repair and log its error: a read-only folder must not prevent a resume."""
    try:
        action()
    except OSError as error:
        log.warning("A repair in the folder of the checkpoints failed: %s", error)
