"""Publishes a checkpoint: its files become visible all at once, so that readers always find a whole one.

Ranks publish, and so does the writer process, which runs without torch.
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
from slurmddp.checkpoint.files.durable import FileRecord, sync_folder, write_hashed, write_small
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
"""Writes and flushes the files of a checkpoint into an empty folder; returns their records by name."""


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
        step: the number of the step, 0 or more.
        fill: writes the files into an empty folder. After a transient error of the file system it is called
            again with another folder.
        meta: facts for the manifest, as JSON values.
        keep_last: number of checkpoints to keep; two always stay.
        keep_best: name of a metric in `meta["metrics"]`, and "min" or "max": the best checkpoint stays too.
        needed: number of bytes that `fill` writes, checked against the free space first; 0: unknown.
        made_by: software versions for the manifest; None: the versions in this process.
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
    once = partial(_publish_once, target, fill, meta, needed, versions() if made_by is None else made_by)
    try:
        retried(once, f"Writing the checkpoint of step {step}")
    except OSError as error:
        RunContext.read(os.environ).refuse_superseded()  # A later attempt deletes unfinished folders.
        raise explained(error, f"The checkpoint of step {step} could not be written to {root}") from error
    _follow_up(target, partial(prune, root, keep_last, target, keep_best), durable)
    return target


def _publish_once(
    target: Path, fill: Fill, meta: Mapping[str, Any], needed: int, made_by: Mapping[str, str]
) -> None:
    """Write all files again and move them in: after a failed fsync the kernel may have dropped pages."""
    with fresh_folder(target.parent, target.name, needed) as temporary:
        step = int(target.name.removeprefix("step-"))
        complete(temporary, Manifest(step, _filled(temporary, fill), meta, made_by))
        # No lock spans the hosts. A later race would still publish a whole checkpoint of this training.
        RunContext.read(os.environ).refuse_superseded()
        _move_in(temporary, target)
    trust(target)


def _filled(folder: Path, fill: Fill) -> Mapping[str, FileRecord]:
    """Call `fill` and return its records; raises CheckpointError for a file without a record."""
    records = fill(folder)
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    for name in sorted(written ^ records.keys()):
        found = "A checkpoint's folder holds" if name in written else "There is no file"
        raise CheckpointError(
            f"{found} {name}, which is {'not ' if name in written else ''}among the records.",
            hint="Return `checkpoint.files.durable.record_of(path)` for each file that was written.",
        )
    return records


@contextmanager
def fresh_folder(root: Path, name: str, needed: int) -> Iterator[Path]:
    """Check the free space and yield a new hidden folder, locked; delete the folder at the end."""
    root.mkdir(parents=True, exist_ok=True)
    RunContext.read(os.environ).refuse_superseded()  # A later attempt may be writing the leftovers.
    clear_leftovers(root)
    space.require(root, needed)
    temporary = root / f"{WRITING}{name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)  # This process left it, or one with the same number.
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
    return made_by if torch is None else {**made_by, "torch": str(torch.__version__)}


def check(step: int, keep_last: int, meta: Mapping[str, Any]) -> None:
    """Raise the error that `publish` raises for these arguments."""
    if step < 0:
        raise CheckpointError(f"A checkpoint can't be of step {step}.", hint="Steps count from 0.")
    if not isinstance(keep_last, int) or keep_last < 1:
        raise ConfigError(f"keep_last is {keep_last!r}.", hint="Keep at least 1 checkpoint (2 always stay).")
    try:
        text = json.dumps(dict(meta), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The facts given with the checkpoint are not JSON: {error}.") from error
    if json.loads(text) != meta:
        raise CheckpointError(
            "The facts given with the checkpoint would change on the way through JSON.",
            hint="Use string keys and lists instead of tuples.",
        )


def complete(folder: Path, manifest: Manifest) -> None:
    """Write the manifest as the last file, and flush the folder."""
    write_hashed(folder / MANIFEST_FILE, [memoryview(manifest.to_json().encode())])
    sync_folder(folder)


def _move_in(temporary: Path, target: Path) -> None:
    """Give a finished folder its name; replace a checkpoint of the same step only if they differ.

    A checkpoint of another program stays under another name.
    """
    root = target.parent
    aside = root / f"{REPLACED}{target.name}"
    if is_there(target) and not are_of_one_program(temporary, target):
        set_aside(target, ABANDONED)
    if is_there(target):
        if _same(temporary, target):
            sync_folder(root)  # An earlier try may have failed at this flush.
            return
        # After a kill between these two renames, `restore_replaced` restores the old folder.
        target.rename(aside)
        sync_folder(root)
    try:
        temporary.rename(target)
    except OSError:
        restore_replaced(root)
        raise
    sync_folder(root)
    shutil.rmtree(aside, ignore_errors=True)


def _follow_up(target: Path, tidy: Callable[[], object], durable: Callable[[], object]) -> None:
    """Move the pointer and prune; errors are only logged, because the checkpoint is durable already."""
    RunContext.read(os.environ).refuse_superseded()
    try:
        pointer = target.parent / POINTER_FILE
        retried(partial(write_small, pointer, target.name + "\n"), f"Moving {pointer}")
    except OSError as error:
        log.warning("Checkpoint %s is written, but %s was not moved there: %s", target, POINTER_FILE, error)
    durable()
    try:
        tidy()
    except OSError as error:
        log.warning("Checkpoint %s is written, but the folder could not be tidied: %s", target, error)


def _same(new: Path, old: Path) -> bool:
    return still_good(old) and load_manifest(old).files == load_manifest(new).files


def explained(error: OSError, what: str) -> CheckpointError:
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
